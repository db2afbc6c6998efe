// Packed weights of integer codes (core/code_format.h) as kernels for GPUs read them.
//
// The layout is that of the CPU. A warp takes one group of a panel: 32 elements of K of 32 columns.
// Lane 4 g + t reads four columns, 4 g to 4 g + 3, at the elements 8 t to 8 t + 7, so that codes of 4
// bits are one load of 16 bytes a lane, side by side. The integer product of a group is exact, so its
// elements may be in any order: those of lane t are the two registers of a fragment of
// warp_mma_int8, whose 16 rows are columns, in two products for the panel's 32.
#pragma once

#include "core/code_format.h"
#include "cuda/half.h"

namespace cadenza::cuda {

// How the codes of a group are unpacked.
enum class Unpacking : int32_t { kNibbles, kE2m1, kFiveBits, kSixBits, kBytes, kHalfBytes };
constexpr int kNumUnpackings = 6;

constexpr Unpacking unpacking_of(const CodeFormat& format) {
  if (format.bits == 8) return format.group == 16 ? Unpacking::kHalfBytes : Unpacking::kBytes;
  if (format.bits == 6) return Unpacking::kSixBits;
  if (format.bits == 5) return Unpacking::kFiveBits;
  return format.is_mxfp4() ? Unpacking::kE2m1 : Unpacking::kNibbles;
}

// The groups of two parts have a scale for each sixteen elements.
template <Unpacking U>
constexpr int kParts = U == Unpacking::kSixBits || U == Unpacking::kHalfBytes ? 2 : 1;
// Registers of a lane's codes.
template <Unpacking U>
constexpr int kCodeWords = U == Unpacking::kNibbles || U == Unpacking::kE2m1 ? 4 : 8;

// A format as numbers that kernels look up.
struct FormatTable {
  struct Entry {
    Unpacking unpacking;
    ScaleType scale;
    Correction correction;
    int32_t parts, group_bytes, factor_bytes, scales_at, corrections_at;
    int32_t zero;  // what is subtracted from the codes as kernels multiply them
  };
  Entry of[kNumCodeFormats] = {};

  constexpr FormatTable() {
    for (int i = 0; i < kNumCodeFormats; i++) {
      const CodeFormat& format = kCodeFormats[i];
      int zero = format.is_mxfp4() ? kE2m1Bias : format.middle();
      if (format.bits == 8 || (!format.is_mxfp4() && format.correction != Correction::kNone)) zero = 0;
      of[i] = {unpacking_of(format),       format.scale,
               format.correction,          format.num_parts(),
               int32_t(format.group_bytes()), int32_t(format.factor_bytes()),
               int32_t(format.code_bytes()), int32_t(format.corrections_at()),
               zero};
    }
  }
};

static __constant__ const FormatTable kFormatTable;

// A panel of a weight in the device's memory.
struct CodePanelView {
  const uint8_t* factors;  // where the panel begins
  const uint8_t* groups;
  int32_t format;

  __device__ __forceinline__ const FormatTable::Entry& entry() const { return kFormatTable.of[format]; }
};

__device__ __forceinline__ int64_t groups_of(int64_t k) { return (k + kGroup - 1) / kGroup; }

// Where the groups of a panel begin.
__device__ __forceinline__ int64_t groups_at(const FormatTable::Entry& format, int64_t k) {
  return (k + kNested - 1) / kNested * format.factor_bytes;
}

__device__ __forceinline__ const int32_t* device_order(const uint8_t* weight) {
  const auto& header = *reinterpret_cast<const CodesHeader*>(weight);
  return header.has_order == 0 ? nullptr : reinterpret_cast<const int32_t*>(weight + sizeof(CodesHeader));
}

__device__ __forceinline__ CodePanelView device_panel(const uint8_t* weight, int index, int64_t k) {
  const auto& header = *reinterpret_cast<const CodesHeader*>(weight);
  const uint8_t* data = weight + sizeof(CodesHeader);
  if (header.has_order != 0) data += (4 * k + 63) / 64 * 64;
  for (int i = 0;; i++) {
    const CodeSegment segment = header.segments[i];
    const FormatTable::Entry& format = kFormatTable.of[segment.format];
    const int64_t bytes = groups_at(format, k) + groups_of(k) * format.group_bytes;
    if (i + 1 == header.num_segments || index < segment.panels) {
      const uint8_t* panel = data + index * bytes;
      return {panel, panel + groups_at(format, k), segment.format};
    }
    data += segment.panels * bytes;
    index -= segment.panels;
  }
}

// A lane's codes of one group, as they are stored.
template <Unpacking U>
struct StoredCodes {
  uint32_t words[kCodeWords<U>];
};

__device__ __forceinline__ void load_words(uint32_t* words, const uint8_t* at) {
  const uint4 four = load_constant(reinterpret_cast<const uint4*>(at));
  words[0] = four.x;
  words[1] = four.y;
  words[2] = four.z;
  words[3] = four.w;
}

template <Unpacking U>
__device__ __forceinline__ void load_codes(StoredCodes<U>& codes, const uint8_t* group, int lane) {
  const int columns = lane / 4 * 16, t = lane % 4;  // the bytes of four columns' words
  constexpr int kStep = kPanel * 4;
  if constexpr (U == Unpacking::kNibbles || U == Unpacking::kE2m1) {
    load_words(codes.words, group + t * kStep + columns);
  } else if constexpr (U == Unpacking::kFiveBits) {
    load_words(codes.words, group + t * kStep + columns);
    load_words(codes.words + 4, group + 4 * kStep + columns);
  } else if constexpr (U == Unpacking::kSixBits) {
    const uint8_t* part = group + t / 2 * 3 * kStep;
    load_words(codes.words, part + t % 2 * kStep + columns);
    load_words(codes.words + 4, part + 2 * kStep + columns);
  } else {
    load_words(codes.words, group + 2 * t * kStep + columns);
    load_words(codes.words + 4, group + (2 * t + 1) * kStep + columns);
  }
}

// Eight codes of MXFP4 in the nibbles of a word, as values + 12 in bytes: the low nibbles' and the high ones'.
__device__ __forceinline__ void unpack_e2m1(uint32_t word, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kFirst = 0x0f0e0d0c, kLast = 0x18141210;  // 12 + 0, 1, 2, 3 and 4, 6, 8, 12
  const uint32_t selector = word & 0x77777777u;
  const uint32_t even = __byte_perm(kFirst, kLast, selector & 0xffff);
  const uint32_t odd = __byte_perm(kFirst, kLast, selector >> 16);
  const uint32_t positive[2] = {__byte_perm(even, odd, 0x6420), __byte_perm(even, odd, 0x7531)};
  uint32_t* const to[2] = {&low, &high};
  for (int i = 0; i < 2; i++) {
    const uint32_t negative = (word >> (3 + 4 * i) & 0x01010101u) * 0xffu;
    *to[i] = positive[i] ^ ((positive[i] ^ (0x18181818u - positive[i])) & negative);
  }
}

// Column i of a lane's four: its first and its last four codes as bytes, below 128 or with a sign.
template <Unpacking U>
__device__ __forceinline__ void unpack(const StoredCodes<U>& codes, int i, int lane, uint32_t& low,
                                       uint32_t& high) {
  const uint32_t word = codes.words[i];
  if constexpr (U == Unpacking::kE2m1) {
    unpack_e2m1(word, low, high);
  } else if constexpr (kCodeWords<U> == 4 || U == Unpacking::kFiveBits || U == Unpacking::kSixBits) {
    low = word & 0x0f0f0f0fu;
    high = word >> 4 & 0x0f0f0f0fu;
    const int t = lane % 4;
    if constexpr (U == Unpacking::kFiveBits) {
      low |= (codes.words[4 + i] >> 2 * t & 0x01010101u) << 4;
      high |= (codes.words[4 + i] >> (2 * t + 1) & 0x01010101u) << 4;
    }
    if constexpr (U == Unpacking::kSixBits) {
      low |= (codes.words[4 + i] >> 4 * (t % 2) & 0x03030303u) << 4;
      high |= (codes.words[4 + i] >> (4 * (t % 2) + 2) & 0x03030303u) << 4;
    }
  } else {
    low = word ^ 0x80808080u;
    high = codes.words[4 + i] ^ 0x80808080u;
  }
}

// A lane's codes as the fragments of two products: rows g and g + 8 of product j are the columns
// 4 g + 2 j and 4 g + 2 j + 1.
template <Unpacking U>
__device__ __forceinline__ void unpack_all(const StoredCodes<U>& codes, int lane, uint32_t (&a)[2][4]) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    unpack<U>(codes, 2 * j, lane, a[j][0], a[j][2]);
    unpack<U>(codes, 2 * j + 1, lane, a[j][1], a[j][3]);
  }
}

// The scale and the correction of one column in one part of a group, as they are stored.
struct StoredTerms {
  uint32_t scale, correction;
  uint32_t factors;  // of nested scales, and in the high half of offsets
};

struct alignas(8) ColumnTerms {
  float scale;
  float correction;  // a zero point or an offset
};

__device__ __forceinline__ uint32_t load_value(const uint8_t* values, int size, int at) {
  if (size == 4) return load_constant(reinterpret_cast<const uint32_t*>(values) + at);
  if (size == 2) return load_constant(reinterpret_cast<const uint16_t*>(values) + at);
  return load_constant(values + at);
}

// Of part `part` of group `group` of a panel.
__device__ __forceinline__ StoredTerms load_terms(const CodePanelView& panel, int64_t group, int part,
                                                  int column) {
  const FormatTable::Entry& format = panel.entry();
  const uint8_t* at = panel.groups + group * format.group_bytes;
  const int place = part * kPanel + column;
  const int size = format.scale == ScaleType::kNested ? 1 : format.scale == ScaleType::kF32 ? 4 : 2;
  StoredTerms terms{load_value(at + format.scales_at, size, place), 0, 0};
  if (format.correction == Correction::kZeroPoint) {
    terms.correction = load_value(at + format.corrections_at, 1, place);
  } else if (format.correction == Correction::kOffset) {
    terms.correction = load_value(at + format.corrections_at, size, place);
  }
  if (format.scale == ScaleType::kNested) {
    const uint8_t* factors = panel.factors + group / (kNested / kGroup) * format.factor_bytes;
    terms.factors = load_value(factors, 2, column);
    if (format.correction == Correction::kOffset) {
      terms.factors |= load_value(factors, 2, kPanel + column) << 16;
    }
  }
  return terms;
}

__device__ __forceinline__ float scale_value(ScaleType type, uint32_t bits, uint32_t factor) {
  if (type == ScaleType::kF16) return half_to_float(bits);
  if (type == ScaleType::kF32) return as_bits<float>(bits);
  if (type == ScaleType::kBf16) return as_bits<float>(bits << 16);
  return half_to_float(factor) * float(int(bits) - 128);
}

__device__ __forceinline__ ColumnTerms terms_of(const FormatTable::Entry& format, const StoredTerms& stored) {
  ColumnTerms terms{scale_value(format.scale, stored.scale, stored.factors & 0xffff), float(format.zero)};
  if (format.correction == Correction::kZeroPoint) terms.correction = float(int(stored.correction));
  if (format.correction == Correction::kOffset) {
    terms.correction = scale_value(format.scale, stored.correction, stored.factors >> 16);
  }
  return terms;
}

}  // namespace cadenza::cuda
