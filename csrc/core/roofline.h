// What this machine can do at most: bytes read and numbers multiplied a second, on all threads.
#pragma once

#include <cstdint>

#include "core/ops.h"

namespace cadenza {

// Units are blocks of kReadBlock bytes.
constexpr int64_t kReadBlock = 1 << 20;
struct ReadTask {
  const void* data;  // 64-byte aligned, a multiple of kReadBlock long
};

// A unit is `steps` multiplications of a register tile with itself; each adds what it multiplied.
constexpr int64_t kMultiplySeeds = 64;
struct MultiplyTask {
  const void* seeds;  // [kMultiplySeeds] of the element type
  int64_t steps;
  int64_t* operations;  // shared by all threads
};

// Bytes a second of the fastest of `repeats` passes over `bytes`, rounded down to whole blocks.
double measure_read(const Runtime& runtime, const void* data, int64_t bytes, int repeats);

// Operations a second of the fastest of `repeats` runs; a multiplication and its sum are two.
double measure_multiply(const Runtime& runtime, DType dtype, int repeats);

}  // namespace cadenza
