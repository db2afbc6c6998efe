// cublasLt, where the machine has it.
#pragma once

#include "cuda/cublaslt_abi.h"

namespace cadenza::cuda {

// Its functions, or null if it is not found. Loaded once: what is in the process already, as XLA loads
// it, then the system's, then that of the folders which were named.
const lt::Functions* cublaslt();

// A folder in which to search; before the first call of cublaslt().
void search_cublaslt_in(const char* folder);

}  // namespace cadenza::cuda
