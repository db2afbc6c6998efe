// The instruction sets that this CPU can run and there are kernels for.
#pragma once

#include <string>
#include <vector>

namespace cadenza {

// Of the kernels of KernelTable, fastest first; the last one is scalar, which every CPU runs.
std::vector<std::string> isas_of_cpu();

// The same of IntegerKernels.
std::vector<std::string> integer_isas_of_cpu();

// Whether an ISA's table rounds bfloat16 as its own instructions do, not as the portable class.
bool has_bf16_instructions(const std::string& isa);

}  // namespace cadenza
