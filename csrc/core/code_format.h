// Packed weights of integer codes: their formats and their layout.
//
// A packed weight is a CodesHeader, the order of its inputs if it has one, and its panels of 32
// columns. An order is [K] int32, each index once: element i of a column is multiplied by activation
// order[i]. Consecutive panels of one format are a segment, so operands that are fused may have
// several formats, but one order. A panel of nested scales begins with their factors: for each 256
// elements of K, [32 columns] f16 of the scales and [32] f16 of the offsets, if there are any. Then a
// panel has a group for each 32 elements of K, one behind the other, and a group has
//   codes: 8 bits: [32 / 4][32 columns][4] bytes, each a code + 128
//          4 bits: [32 / 8][32 columns][4] bytes, whose low nibbles are codes 0 to 3 of eight and
//          whose high nibbles are codes 4 to 7; codes from 0 to 15, or code + 8 without a correction
//          5 bits: the low four as 4 bits, then [32 columns][4] bytes, in which bit i is the fifth bit
//          of code 4 i + byte; codes from 0 to 31, or code + 16 without a correction
//          6 bits, in groups of 16: for each of the two parts the low four as 4 bits, then [32
//          columns][4] bytes, in which bits 2 i and 2 i + 1 are the highest of code 4 i + byte; code + 32
//          4 bits with bf16 scales, MXFP4: indices of kDoubledE2m1
//   scales: [32 / group][32 columns]; nested ones are bytes, each an integer + 128, and multiplied by
//   the factor, which is exact in f32
//   zero points, u8 [32 columns], or offsets like the scales
#pragma once

#include <cstdint>

#include "core/types.h"

namespace cadenza {

// Scales in bf16 are those of MXFP4, which are powers of two.
enum class ScaleType : int32_t { kF16 = 0, kF32 = 1, kNested = 2, kBf16 = 3 };

// What corrects codes without sign: an integer that is subtracted from the codes, or a float that is
// added to the products of code and scale.
enum class Correction : int32_t { kNone = 0, kZeroPoint = 1, kOffset = 2 };

// What the codes of MXFP4 stand for: twice the values of E2M1.
constexpr int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// What a product adds to them, so that they have no sign.
constexpr int kE2m1Bias = 12;

// Elements of K whose nested scales have one factor.
constexpr int kNested = 256;

struct CodeFormat {
  int bits;   // of a code: 4, 5, 6 or 8
  int group;  // consecutive elements with one scale: 32 or 16
  ScaleType scale;  // also of offsets
  Correction correction;

  constexpr int num_parts() const { return kGroup / group; }
  constexpr int64_t code_bytes() const { return kGroup * kPanel * bits / 8; }
  // Of a part's codes, without what they have above their low four bits.
  constexpr int64_t nibble_bytes() const { return group * kPanel / 2; }
  // The code that is stored for 0 without a correction.
  constexpr int middle() const { return 1 << (bits - 1); }
  constexpr int64_t scale_size() const {
    return scale == ScaleType::kNested ? 1 : (scale == ScaleType::kF32 ? 4 : 2);
  }
  // Whether codes are indices of kDoubledE2m1.
  constexpr bool is_mxfp4() const { return scale == ScaleType::kBf16; }
  constexpr int64_t scale_bytes() const { return num_parts() * kPanel * scale_size(); }
  constexpr int64_t correction_bytes() const {
    if (correction == Correction::kZeroPoint) return num_parts() * kPanel;
    return correction == Correction::kOffset ? scale_bytes() : 0;
  }
  constexpr int64_t corrections_at() const { return code_bytes() + scale_bytes(); }
  constexpr int64_t group_bytes() const { return corrections_at() + correction_bytes(); }
  // Of the factors of nested scales for 256 elements of K.
  constexpr int64_t factor_bytes() const {
    if (scale != ScaleType::kNested) return 0;
    return kPanel * 2 * (correction == Correction::kOffset ? 2 : 1);
  }
  // Where a panel's groups begin.
  constexpr int64_t groups_at(int64_t k) const { return ceil_div(k, kNested) * factor_bytes(); }
  constexpr int64_t panel_bytes(int64_t k) const {
    return groups_at(k) + ceil_div(k, kGroup) * group_bytes();
  }
  constexpr bool operator==(const CodeFormat& other) const {
    return bits == other.bits && group == other.group && scale == other.scale &&
           correction == other.correction;
  }
};

// The formats that kernels exist for; a format is named by its index.
constexpr CodeFormat kCodeFormats[] = {
    {8, 32, ScaleType::kF16, Correction::kNone},   {8, 32, ScaleType::kF16, Correction::kOffset},
    {8, 32, ScaleType::kF32, Correction::kNone},   {8, 32, ScaleType::kF32, Correction::kOffset},
    {4, 32, ScaleType::kF16, Correction::kNone},   {4, 32, ScaleType::kF16, Correction::kZeroPoint},
    {4, 32, ScaleType::kF16, Correction::kOffset}, {4, 32, ScaleType::kF32, Correction::kNone},
    {4, 32, ScaleType::kF32, Correction::kZeroPoint},
    {4, 32, ScaleType::kF32, Correction::kOffset}, {8, 16, ScaleType::kF32, Correction::kNone},
    {8, 16, ScaleType::kF32, Correction::kOffset}, {4, 32, ScaleType::kNested, Correction::kOffset},
    {8, 32, ScaleType::kNested, Correction::kOffset},
    {6, 16, ScaleType::kNested, Correction::kNone},  {5, 32, ScaleType::kF16, Correction::kNone},
    {5, 32, ScaleType::kF16, Correction::kOffset},   {5, 32, ScaleType::kNested, Correction::kOffset},
    {4, 32, ScaleType::kBf16, Correction::kNone},
};
constexpr int kNumCodeFormats = sizeof(kCodeFormats) / sizeof(*kCodeFormats);

// The index of a format, or -1.
constexpr int index_of(const CodeFormat& format) {
  for (int i = 0; i < kNumCodeFormats; i++) {
    if (kCodeFormats[i] == format) return i;
  }
  return -1;
}

constexpr int kInt8Format = index_of(CodeFormat{8, 32, ScaleType::kF16, Correction::kNone});
constexpr int kInt4Format = index_of(CodeFormat{4, 32, ScaleType::kF16, Correction::kZeroPoint});

constexpr int64_t code_panel_bytes(int format, int64_t k) {
  return kCodeFormats[format].panel_bytes(k);
}

struct CodeSegment {
  int32_t format;
  int32_t panels;
};

struct CodesHeader {
  static constexpr uint32_t kVersion = 0x43445a04;
  static constexpr int kMaxSegments = 6;

  uint32_t version;
  int16_t num_segments;
  int16_t has_order;  // 0 or 1
  int64_t k;
  CodeSegment segments[kMaxSegments];

  bool is_valid() const {
    if (version != kVersion || num_segments < 1 || num_segments > kMaxSegments) return false;
    if (has_order != 0 && has_order != 1) return false;
    for (int i = 0; i < num_segments; i++) {
      const CodeSegment& each = segments[i];
      if (each.format < 0 || each.format >= kNumCodeFormats || each.panels < 0) return false;
    }
    return true;
  }
  int64_t num_panels() const {
    int64_t panels = 0;
    for (int i = 0; i < num_segments; i++) panels += segments[i].panels;
    return panels;
  }
  // Where the panels begin: at a cache line.
  int64_t panels_at() const {
    return int64_t(sizeof(CodesHeader)) + (has_order == 0 ? 0 : round_up(4 * k, 64));
  }
  // Of the whole weight.
  int64_t num_bytes() const {
    int64_t bytes = panels_at();
    for (int i = 0; i < num_segments; i++) {
      bytes += segments[i].panels * code_panel_bytes(segments[i].format, k);
    }
    return bytes;
  }
};
static_assert(sizeof(CodesHeader) == 64, "panels begin at a cache line");

inline const CodesHeader& codes_header(const void* weight) {
  return *static_cast<const CodesHeader*>(weight);
}

// The order of a weight's inputs, or null if they are as they come.
inline const int32_t* input_order(const void* weight) {
  const CodesHeader& header = codes_header(weight);
  return header.has_order == 0 ? nullptr : reinterpret_cast<const int32_t*>(&header + 1);
}

struct CodePanel {
  const uint8_t* data;
  int format;
  int64_t bytes;
};

inline CodePanel code_panel(const void* weight, int64_t index) {
  const CodesHeader& header = codes_header(weight);
  const uint8_t* data = static_cast<const uint8_t*>(weight) + header.panels_at();
  int i = 0;
  for (; i + 1 < header.num_segments && index >= header.segments[i].panels; i++) {
    data += header.segments[i].panels * code_panel_bytes(header.segments[i].format, header.k);
    index -= header.segments[i].panels;
  }
  const int format = header.segments[i].format;
  const int64_t bytes = code_panel_bytes(format, header.k);
  return {data + index * bytes, format, bytes};
}

}  // namespace cadenza
