// Selects the kernels at run time: the best ISA that the CPU supports, or CADENZA_CPU_ISA.
#pragma once

#include <string>
#include <vector>

#include "core/kernel_table.h"

namespace cadenza {

// Names of the ISAs that are compiled in and supported by this CPU, best first.
std::vector<std::string> available_isas();

// Returns the kernels of one ISA; an empty name selects the best. Throws std::invalid_argument with
// the list of available ISAs for any other name.
const KernelTable& kernels_for(const std::string& name);

// The process-wide kernels, selected at first use from CADENZA_CPU_ISA.
const KernelTable& kernels();

}  // namespace cadenza
