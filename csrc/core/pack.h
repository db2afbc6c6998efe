// Packs weights at load: stored rows [N, K] become panels of 32 columns, [K/step][32][step].
#pragma once

#include <vector>

#include "core/gguf_blocks.h"
#include "core/pool.h"
#include "core/types.h"

namespace cadenza {

// A stored weight [rows, K]; the elements of a row are contiguous.
struct PackSource {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t row_stride;  // in elements
};

struct PackTask {
  // The rows of all sources, concatenated, are the packed columns. Gated: two sources, gate and up;
  // each panel holds sixteen gate columns followed by the same sixteen up columns.
  std::vector<PackSource> sources;
  int64_t k;
  void* packed;        // 64-byte aligned, packed_bytes() long
  DType packed_dtype;  // bf16 or f32
  bool gated;
};

// Bytes of a packed weight of n columns; for a gated weight n = F, the columns of gate alone.
int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool gated);

// Writes every column and zeros the padding of the last panel. Throws std::invalid_argument for
// unsupported sizes, types or alignments.
void pack(Executor& executor, const PackTask& task);

// A weight to be quantised, or the codes of one.
struct CodeSource {
  PackSource rows;          // floats; with scales codes of a byte, signed; or blocks, in bytes
  int target;               // the format in which it is packed
  int format;               // of codes or blocks
  const void* scales;       // [rows, K / group], or null
  const void* corrections;  // zero points or offsets [rows, K / group], if the format has them
  const BlockType* blocks;  // the type of a GGUF tensor's rows, or null
  int64_t paired_heads;     // the rows are those of so many heads, each in the order 0, D / 2, 1,
                            // D / 2 + 1, ..., and are packed in the order 0, 1, ...; or 0
};

// The sources of a weight of integer codes; panels and columns as in PackTask. Sources of different
// targets begin at a panel, and those of gate and up have one target.
struct QuantisedPackTask {
  std::vector<CodeSource> sources;
  int64_t k;
  uint8_t* packed;  // 32-byte aligned
  int64_t packed_bytes;  // those of the header, the order and the panels
  bool gated;
  const int32_t* order = nullptr;  // of the inputs [K], which the sources' codes have; or null
};

// Quantises floats by the rules of core/quantised.h; codes keep their values in a target that has
// them. The padding has codes and scales of 0. Throws std::invalid_argument for unsupported sizes,
// formats or alignments.
void pack_quantised(Executor& executor, const QuantisedPackTask& task);

// Reads back one packed column as f32; used by tests.
void unpack_column(const void* packed, DType dtype, int64_t k, int64_t column, float* out);

}  // namespace cadenza
