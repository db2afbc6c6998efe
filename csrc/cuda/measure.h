// What the card can do at best: the bounds of a step.
#pragma once

#include <cstdint>

namespace cadenza::cuda {

// Bytes a second that kernels read of memory which no cache holds, and bytes a second that a copy on
// the device reads and writes.
double read_rate();
double copy_rate();

// Operations a second, a multiplication and an addition each, of tensor cores in bf16 with sums in
// float32, and in int8: the faster of cublasLt and of a loop in registers.
double bf16_rate();
double int8_rate();

}  // namespace cadenza::cuda
