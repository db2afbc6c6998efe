#include "core/gguf_blocks.h"

#include <cmath>
#include <cstring>

#include "core/code_format.h"
#include "core/half.h"

namespace cadenza {

namespace {

uint16_t load_half(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return half;
}

void set_scale(const uint8_t* from, CodeGroup& group) {
  group.scales[0] = group.scales[1] = f16_to_f32(load_half(from));
}

void set_offset(const uint8_t* from, CodeGroup& group) {
  group.offsets[0] = group.offsets[1] = f16_to_f32(load_half(from));
}

// Sixteen bytes have the first sixteen codes in their low halves and the others in the high ones.
void read_nibbles(const uint8_t* from, int bias, CodeGroup& group) {
  for (int i = 0; i < 16; i++) {
    group.codes[i] = int8_t((from[i] & 15) - bias);
    group.codes[i + 16] = int8_t((from[i] >> 4) - bias);
  }
}

// Adds the fifth bits of codes.
void add_fifth_bits(const uint8_t* from, CodeGroup& group) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  for (int i = 0; i < kGroup; i++) {
    group.codes[i] = int8_t(group.codes[i] + ((bits >> i & 1) << 4));
  }
}

void read_q4_0(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 18;
  set_scale(block, group);
  read_nibbles(block + 2, 8, group);
}

void read_q4_1(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 20;
  set_scale(block, group);
  set_offset(block + 2, group);
  read_nibbles(block + 4, 0, group);
}

void read_q5_0(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 22;
  set_scale(block, group);
  read_nibbles(block + 6, 16, group);
  add_fifth_bits(block + 2, group);
}

void read_q5_1(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 24;
  set_scale(block, group);
  set_offset(block + 2, group);
  read_nibbles(block + 8, 0, group);
  add_fifth_bits(block + 4, group);
}

void read_q8_0(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 34;
  set_scale(block, group);
  std::memcpy(group.codes, block + 2, kGroup);
}

void set_nested(const NestedScales& nested, CodeGroup& group) {
  group.nested = nested;
  const float factor = f16_to_f32(nested.factor);
  for (int part = 0; part < 2; part++) {
    group.scales[part] = factor * float(nested.scales[part]);
    group.offsets[part] = f16_to_f32(nested.offset_factor) * float(nested.offset);
  }
}

// The scale and the minimum of a group from d, dmin and twelve bytes: those of the first four groups
// are in the low bits of the first eight bytes, those of the others in the last four and the high
// bits of the first eight.
void set_k_scales(const uint8_t* block, int64_t sub, CodeGroup& group) {
  const uint8_t* bytes = block + 4;
  int scale, minimum;
  if (sub < 4) {
    scale = bytes[sub] & 63;
    minimum = bytes[sub + 4] & 63;
  } else {
    scale = (bytes[sub + 4] & 15) | (bytes[sub - 4] >> 2 & 48);
    minimum = bytes[sub + 4] >> 4 | (bytes[sub] >> 2 & 48);
  }
  const int8_t of_group = int8_t(scale);
  set_nested({load_half(block), load_half(block + 2), {of_group, of_group}, int8_t(-minimum)},
             group);
}

// The codes' low four bits: each 32 bytes have those of two groups.
void read_k_nibbles(const uint8_t* from, int64_t sub, CodeGroup& group) {
  const uint8_t* bytes = from + sub / 2 * kGroup;
  const int shift = sub % 2 == 0 ? 0 : 4;
  for (int i = 0; i < kGroup; i++) group.codes[i] = int8_t(bytes[i] >> shift & 15);
}

void read_q4_k(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index / 8 * 144;
  set_k_scales(block, index % 8, group);
  read_k_nibbles(block + 16, index % 8, group);
}

void read_q5_k(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index / 8 * 176;
  const int sub = int(index % 8);
  set_k_scales(block, sub, group);
  read_k_nibbles(block + 48, sub, group);
  for (int i = 0; i < kGroup; i++) {
    group.codes[i] = int8_t(group.codes[i] + ((block[16 + i] >> sub & 1) << 4));
  }
}

// Halves of 128 elements, each of 64 bytes with four bits and 32 bytes with the two above them.
void read_q6_k(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index / 8 * 210;
  const int64_t sub = index % 8, half = sub / 4, quarter = sub % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * kGroup;
  const uint8_t* high = block + 128 + half * kGroup;
  const int shift = quarter / 2 * 4, high_shift = int(quarter) * 2;
  for (int i = 0; i < kGroup; i++) {
    const int code = (low[i] >> shift & 15) | (high[i] >> high_shift & 3) << 4;
    group.codes[i] = int8_t(code - 32);
  }
  const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + sub * 2;
  set_nested({load_half(block + 208), 0, {scales[0], scales[1]}, 0}, group);
}

// Codes are twice the values of E2M1, scales half the power of two.
void read_mxfp4(const uint8_t* row, int64_t index, CodeGroup& group) {
  const uint8_t* block = row + index * 17;
  group.scales[0] = group.scales[1] = std::ldexp(0.5f, int(block[0]) - 127);
  for (int i = 0; i < 16; i++) {
    group.codes[i] = kDoubledE2m1[block[1 + i] & 15];
    group.codes[i + 16] = kDoubledE2m1[block[1 + i] >> 4];
  }
}

constexpr BlockType kBlockTypes[] = {
    {2, 32, 18, false, read_q4_0},   {3, 32, 20, false, read_q4_1},
    {6, 32, 22, false, read_q5_0},   {7, 32, 24, false, read_q5_1},
    {8, 32, 34, false, read_q8_0},   {12, 256, 144, true, read_q4_k},
    {13, 256, 176, true, read_q5_k}, {14, 256, 210, true, read_q6_k},
    {39, 32, 17, false, read_mxfp4},
};

}  // namespace

const BlockType* find_block_type(int number) {
  for (const BlockType& type : kBlockTypes) {
    if (type.number == number) return &type;
  }
  return nullptr;
}

}  // namespace cadenza
