// Measures the machine's roofline: memory read bandwidth and FLOP/s, on all threads.
#pragma once

#include <cstdint>

#include "core/ops.h"

namespace cadenza {

// A unit is a block of kReadBlock bytes.
constexpr int64_t kReadBlock = 1 << 20;
struct ReadTask {
  const void* data;  // 64-byte aligned; units * kReadBlock bytes
};

// A unit is `steps` multiply-accumulate steps of a register tile, without memory reads.
constexpr int64_t kMultiplySeeds = 64;
struct MultiplyTask {
  const void* seeds;  // [kMultiplySeeds] of the element type
  int64_t steps;
  int64_t* operations;  // counter of all threads, added to atomically
};

// Returns bytes per second of the fastest of `repeats` passes over `data`; `bytes` is rounded down
// to blocks.
double measure_read(const Runtime& runtime, const void* data, int64_t bytes, int repeats);

// Returns FLOP/s of the fastest of `repeats` runs; a multiply-add counts as two operations.
double measure_multiply(const Runtime& runtime, DType dtype, int repeats);
// The same of the dots of int8 codes.
double measure_multiply_codes(const Runtime& runtime, int repeats);

}  // namespace cadenza
