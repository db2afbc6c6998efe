// Packing weights once at load: [N, K] rows into panels of 32 columns, K side by side in steps.
#pragma once

#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace cadenza {

// A stored weight [rows, K]; the elements of a row lie side by side.
struct PackSource {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t row_stride;  // in elements
};

struct PackTask {
  // Their rows, one source after another, are the columns. Gated: gate and up, of which each panel
  // holds sixteen columns and then the other's same sixteen.
  std::vector<PackSource> sources;
  int64_t k;
  void* packed;        // 64-byte aligned, packed_bytes() long
  DType packed_dtype;  // bf16 or f32
  bool gated;
};

// Bytes of a packed weight with n columns; a gated one has n = 2 F rounded up to whole panels.
int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool gated);

// Writes every column, and zeros where the last panel has none. Throws std::invalid_argument for
// sizes, types or alignments that do not fit.
void pack(Executor& executor, const PackTask& task);

// The inverse for one column, as f32: for tests and for reading a weight back.
void unpack_column(const void* packed, DType dtype, int64_t k, int64_t column, float* out);

}  // namespace cadenza
