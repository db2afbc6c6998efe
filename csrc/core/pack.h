// Packing weights once at load: [N, K] rows into panels of 32 columns, K side by side in steps.
#pragma once

#include "core/pool.h"
#include "core/types.h"

namespace cadenza {

// Where a source's rows go among the columns of a packed weight.
enum class PackLayout : int32_t {
  kPlain = 0,  // row i is column column_offset + i
  kGate = 1,   // sixteen gate columns open each panel
  kUp = 2,     // sixteen up columns close it
};

struct PackTask {
  const void* source;
  DType source_dtype;
  int64_t rows, k;     // rows of the source that become columns
  int64_t row_stride;  // in elements
  void* packed;        // 64-byte aligned, packed_bytes() long
  DType packed_dtype;  // bf16 or f32
  int64_t n;           // columns of the packed weight (F for gate and up)
  int64_t column_offset;
  PackLayout layout;
};

// Bytes of a packed weight with n columns; a gated one has n = 2 F rounded up to whole panels.
int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool gated);

// Writes one source. The source that holds the last column also writes the padding after it.
// Throws std::invalid_argument for sizes, types or alignments that do not fit.
void pack(Executor& executor, const PackTask& task);

// The inverse for one column, as f32: for tests and for reading a weight back.
void unpack_column(const void* packed, DType dtype, int64_t k, int64_t column, float* out);

}  // namespace cadenza
