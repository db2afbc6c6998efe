// The quantised types of GGUF files, read group by group.
//
// Source of the layouts: ggml's ggml-quants.c. Scales, minimums and codes are those of the file.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace cadenza {

// Scales of a group as integers, with their factors for 256 elements, f16.
struct NestedScales {
  uint16_t factor, offset_factor;
  int8_t scales[2], offset;
};

// The codes of one column's group: an element is (code - zero_point) * scale + offset, with the
// scale and the offset of its half.
struct CodeGroup {
  int8_t codes[kGroup];
  int zero_point;
  float scales[2], offsets[2];
  NestedScales nested;  // of types that have them
};

// A type whose rows are blocks.
struct BlockType {
  int number;  // ggml's
  int64_t elements, bytes;  // of a block
  bool is_nested;
  // Reads group `index` of a row.
  void (*read)(const uint8_t* row, int64_t index, CodeGroup& group);
};

// The type with ggml's number, or null.
const BlockType* find_block_type(int number);

}  // namespace cadenza
