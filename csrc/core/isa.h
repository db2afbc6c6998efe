// Which kernels run: the best the CPU has, or the one CADENZA_CPU_ISA names.
#pragma once

#include <string>
#include <vector>

#include "core/kernel_table.h"

namespace cadenza {

// Names of the ISAs that were built and that this CPU can run, best first.
std::vector<std::string> available_isas();

// The kernels of one ISA. An empty name means the best. Throws std::invalid_argument, listing what
// is available, for any other name.
const KernelTable& kernels_for(const std::string& name);

// The process-wide choice, made at first use from CADENZA_CPU_ISA.
const KernelTable& kernels();

}  // namespace cadenza
