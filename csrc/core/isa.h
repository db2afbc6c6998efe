// Selects the kernels at run time: the fastest ISA that the CPU supports, or CADENZA_CPU_ISA.
#pragma once

#include <string>
#include <vector>

#include "core/kernel_table.h"

namespace cadenza {

// Names of the ISAs that are compiled in and supported by this CPU, fastest first.
std::vector<std::string> available_isas();

// Returns the kernels of one ISA; an empty name selects the fastest. Throws std::invalid_argument with
// the list of available ISAs for any other name.
const KernelTable& kernels_for(const std::string& name);

// The process-wide kernels, selected at first use from CADENZA_CPU_ISA.
const KernelTable& kernels();

// Those of the portable class: kernels(), or the next ones without bf16 instructions, which round
// in another way.
const KernelTable& portable_kernels();

// The same for the integer kernels, which are compiled for ISAs of their own. An empty name selects
// the best whose vectors are not wider than those of `isa`, so that forcing one ISA forces both.
std::vector<std::string> available_integer_isas();
const IntegerKernels& integer_kernels_for(const std::string& name, const std::string& isa);

// Selected at first use from CADENZA_CPU_INTEGER_ISA, beside kernels().
const IntegerKernels& integer_kernels();

}  // namespace cadenza
