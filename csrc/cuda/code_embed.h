// Rows of a table of codes.
#pragma once

#include "cuda/launch.h"

namespace cadenza::cuda {

struct CodeEmbedding {
  const int32_t* token_ids;  // [rows]; of no row if outside [0, vocab)
  const int32_t* count;
  int64_t rows, width, vocab;
  const void* table;  // packed, on the device
  float scale;
  float* out;  // f32 [rows, width]
};

void embed_codes(const CodeEmbedding& task);

}  // namespace cadenza::cuda
