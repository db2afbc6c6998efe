// The instruction sets that this CPU can run and there are kernels for.
#pragma once

#include <string>
#include <vector>

namespace cadenza {

// Of the kernels of KernelTable, fastest first; the last one is scalar, which every CPU runs.
std::vector<std::string> isas_of_cpu();

// The same of IntegerKernels.
std::vector<std::string> integer_isas_of_cpu();

// Whether an ISA's table rounds products of bfloat16 as its own instructions do, not as the portable
// class.
bool has_bf16_instructions(const std::string& isa);

// Whether an ISA's table multiplies weights of bfloat16 by tiles.
bool has_tiles(const std::string& isa);

// Why the CPU's tile instructions cannot be used; empty where they can be, or where it has none. Asks
// the system for the permission that a process needs before the first of them.
std::string refusal_of_tiles();

}  // namespace cadenza
