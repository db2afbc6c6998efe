// Products of quantised activations with quantised weights: the arithmetic of core/quantised.h.
//
// Units and epilogues are those of kernels/linear.h and kernels/experts.h; CodeProduct multiplies. A
// column's codes of one group are reduced to an exact integer, so only the order of the groups
// matters, and it is ascending. There is one register tile for each format and number of rows, found
// in a table, as the panels of a weight may have several formats.
#pragma once

#include <utility>

#include "core/quantised.h"
#include "kernels/attention_int8.h"
#include "kernels/code_prefetch.h"
#include "kernels/experts.h"
#include "kernels/prompt_scores.h"
#include "kernels/roofline.h"
#include "vec/dot.h"

namespace cadenza::CADENZA_ISA {

struct QuantisedProduct {
  const uint8_t* x;  // [rows, code_row_bytes(K)]
  const uint8_t* w;  // the panel
  int64_t k;
};

// Prefetches the bytes of one group.
[[gnu::always_inline]] inline void prefetch_group(SpreadPrefetch& prefetch) {
  for (int64_t at = 0; at < prefetch.bytes_per_step; at += kCacheLine) prefetch.line(at);
  prefetch.at += prefetch.bytes_per_step;
}

// A format as a type.
template <int Format>
struct Codes {
  static constexpr CodeFormat kFormat = kCodeFormats[Format];
  static constexpr bool kHasZeroPoints = kFormat.correction == Correction::kZeroPoint;
  static constexpr bool kHasOffsets = kFormat.correction == Correction::kOffset;

  // What a dot begins with, because codes are stored without sign.
  static int32_t start(int32_t total) {
    if constexpr (kFormat.is_mxfp4()) return -kE2m1Bias * total;
    if constexpr (kFormat.bits == 8) return (kCodeBias - kFormat.middle()) * total;
    return kFormat.correction == Correction::kNone ? -kFormat.middle() * total : 0;
  }
  static Vec load_scales(const uint8_t* scales, const uint8_t* factors, int64_t lane) {
    if constexpr (kFormat.scale == ScaleType::kNested) {
      const Vec factor = load_f16(reinterpret_cast<const uint16_t*>(factors) + lane);
      return mul(factor, sub(load_u8(scales + lane), set1(128.0f)));
    } else if constexpr (kFormat.scale == ScaleType::kF32) {
      return load(reinterpret_cast<const float*>(scales) + lane);
    } else if constexpr (kFormat.scale == ScaleType::kBf16) {
      return load_bf16(reinterpret_cast<const bf16*>(scales) + lane);
    } else {
      return load_f16(reinterpret_cast<const uint16_t*>(scales) + lane);
    }
  }
};

// Adds the dots of MR rows with NR column vectors of 8-bit codes of a group, or of a part of it, to
// `dots`.
template <class F, int MR, int NR>
[[gnu::always_inline]] inline void add_byte_dots(VecI (&dots)[MR][NR], const uint8_t* w,
                                                 const uint8_t* x, int64_t row_stride) {
#pragma GCC unroll 8
  for (int step = 0; step < F::kFormat.group / 4; step++) {
    CodeVec columns[NR];
    for (int j = 0; j < NR; j++) columns[j] = load_codes(w + (step * kPanelVecs + j) * 64);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const uint8_t* at = x + i * row_stride + 4 * step;
      CodeOperand codes = broadcast_codes(reinterpret_cast<const int8_t*>(at));
#pragma GCC unroll 2
      for (int j = 0; j < NR; j++) dots[i][j] = dot_codes(dots[i][j], columns[j], codes);
    }
  }
}

// The same with codes of 4 to 6 bits, of which a byte has those of two steps.
template <class F, int MR, int NR>
[[gnu::always_inline]] inline void add_narrow_dots(VecI (&dots)[MR][NR], const uint8_t* w,
                                                   const uint8_t* x, int64_t row_stride) {
  // What MXFP4 multiplies has five bits.
  constexpr int kBits = F::kFormat.is_mxfp4() ? 5 : F::kFormat.bits;
  constexpr int kBytes = F::kFormat.group / 8, kFit = NarrowDots::max_steps(kBits) / 2;
  constexpr int kMost = kFit < kBytes ? kFit : kBytes;
  VecI highest[NR];
  if constexpr (F::kFormat.bits > 4) {
    for (int j = 0; j < NR; j++) highest[j] = load_words(w + F::kFormat.nibble_bytes() + j * 64);
  }
#pragma GCC unroll 2
  for (int first = 0; first < kBytes; first += kMost) {
    NarrowDots sums[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      for (int j = 0; j < NR; j++) sums[i][j] = NarrowDots::begin(dots[i][j]);
    }
#pragma GCC unroll 4
    for (int byte = first; byte < first + kMost; byte++) {
      NarrowDots::Codes columns[2][NR];
      for (int j = 0; j < NR; j++) {
        const uint8_t* at = w + (byte * kPanelVecs + j) * 64;
        if constexpr (F::kFormat.bits > 4) {
          load_wider<F::kFormat.bits>(at, highest[j], columns[0][j], columns[1][j]);
        } else {
          load_nibbles(at, columns[0][j], columns[1][j]);
          if constexpr (F::kFormat.is_mxfp4()) {
            for (auto& each : {&columns[0][j], &columns[1][j]}) *each = biased_e2m1(*each);
          }
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
          const uint8_t* at = x + i * row_stride + 4 * (byte * 2 + half);
          CodeOperand codes = broadcast_codes(reinterpret_cast<const int8_t*>(at));
#pragma GCC unroll 2
          for (int j = 0; j < NR; j++) sums[i][j].add(columns[half][j], codes);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      for (int j = 0; j < NR; j++) dots[i][j] = sums[i][j].end(dots[i][j]);
    }
  }
}

// The group of a product, or the part of it that has its own scales.
struct GroupPart {
  const uint8_t* codes;  // of the first column vector
  const uint8_t* scales;
  const uint8_t* corrections;
  const uint8_t* factors;
  const uint8_t* x;
  int64_t lane;  // of the first column
};

// Part `part` of a group whose bytes are `w`, from column vector `first` on.
template <class F>
[[gnu::always_inline]] inline GroupPart group_part(const uint8_t* w, const uint8_t* factors,
                                                   const uint8_t* x, int part, int first) {
  constexpr CodeFormat kFormat = F::kFormat;
  constexpr int kParts = kFormat.num_parts();
  return {w + part * kFormat.code_bytes() / kParts + first * 64,
          w + kFormat.code_bytes() + part * kFormat.scale_bytes() / kParts,
          w + kFormat.corrections_at() + part * kFormat.correction_bytes() / kParts,
          factors,
          x + part * kFormat.group,
          first * kLanes};
}

// The factors of group g's scales in a panel.
template <class F>
inline const uint8_t* group_factors(const uint8_t* panel, int64_t g) {
  return panel + g / (kNested / kGroup) * F::kFormat.factor_bytes();
}

// The sum of the codes of a group's part.
template <class F>
inline int32_t part_total(const GroupTerms& terms, int part) {
  return F::kFormat.num_parts() == 2 ? terms.totals[part] : terms.totals[0] + terms.totals[1];
}

// Folds one part into the sums; row i's activations have `scales[i]` and sum up to `totals[i]`.
template <class F, int MR, int NR>
[[gnu::always_inline]] inline void fold_part(Vec (&sums)[MR][NR], const GroupPart& part,
                                             int64_t stride, const float (&scales)[MR],
                                             const int32_t (&totals)[MR]) {
  VecI dots[MR][NR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < NR; j++) dots[i][j] = set1_i(uint32_t(F::start(totals[i])));
  }
  if constexpr (F::kFormat.bits == 8) {
    add_byte_dots<F>(dots, part.codes, part.x, stride);
  } else {
    add_narrow_dots<F>(dots, part.codes, part.x, stride);
  }
#pragma GCC unroll 2
  for (int j = 0; j < NR; j++) {
    const int64_t lane = part.lane + j * kLanes;
    const Vec column = F::load_scales(part.scales, part.factors, lane);
    Vec correction = zero();
    if constexpr (F::kHasZeroPoints) correction = load_u8(part.corrections + lane);
    if constexpr (F::kHasOffsets) {
      correction = F::load_scales(part.corrections, part.factors + kPanel * 2, lane);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      Vec dot = from_i32(dots[i][j]);
      // Integers below 2^24, so that nothing is rounded.
      if constexpr (F::kHasZeroPoints) dot = fnma(correction, set1(float(totals[i])), dot);
      sums[i][j] = fma(mul(dot, set1(scales[i])), column, sums[i][j]);
      if constexpr (F::kHasOffsets) {
        sums[i][j] = fma(set1(float(totals[i]) * scales[i]), correction, sums[i][j]);
      }
    }
  }
}

// Folds the groups of MR rows and NR column vectors from vector `first` on.
template <class F, int MR, int NR>
[[gnu::always_inline]] inline void fold_groups(Vec (&sums)[MR][NR], const QuantisedProduct& product,
                                               int64_t row, int first, SpreadPrefetch& prefetch) {
  constexpr CodeFormat kFormat = F::kFormat;
  constexpr int kParts = kFormat.num_parts();
  const int64_t groups = ceil_div(product.k, kGroup), stride = code_row_bytes(product.k);
  const uint8_t* x = product.x + row * stride;
  const uint8_t* terms = x + groups * kGroup;
  const uint8_t* w = product.w + kFormat.groups_at(product.k);
  clear(sums);
  for (int64_t g = 0; g < groups; g++) {
    float scales[MR];
    int32_t totals[kParts][MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      GroupTerms term;
      __builtin_memcpy(&term, terms + i * stride, sizeof(term));
      scales[i] = term.scale;
      for (int part = 0; part < kParts; part++) totals[part][i] = part_total<F>(term, part);
    }
    const uint8_t* factors = group_factors<F>(product.w, g);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      const GroupPart at = group_part<F>(w, factors, x, part, first);
      fold_part<F>(sums, at, stride, scales, totals[part]);
    }
    prefetch_group(prefetch);
    x += kGroup;
    terms += sizeof(GroupTerms);
    w += kFormat.group_bytes();
  }
}

// Folds the second codes of `count` rows into their sums.
template <int Format>
void fold_remainders(const QuantisedProduct& product, int64_t row, int count,
                     Vec (*sums)[kPanelVecs]) {
  using F = Codes<Format>;
  const uint8_t* x = product.x + row * code_row_bytes(product.k) + remainders_at(product.k);
  const uint8_t* groups = product.w + F::kFormat.groups_at(product.k);
  for (int i = 0; i < count; i++, x += code_row_bytes(product.k)) {
    Vec own[1][kPanelVecs];
    for (int v = 0; v < kPanelVecs; v++) own[0][v] = sums[i][v];
    for (int64_t span = 0; span < num_remainders(product.k); span++) {
      Remainder remainder;
      const uint8_t* at = x + span * int64_t(sizeof(remainder));
      __builtin_memcpy(&remainder, at, sizeof(remainder));
      const uint8_t* w = groups + remainder.group * F::kFormat.group_bytes();
      const uint8_t* factors = group_factors<F>(product.w, remainder.group);
      for (int part = 0; part < F::kFormat.num_parts(); part++) {
        fold_part<F, 1, kPanelVecs>(own, group_part<F>(w, factors, at, part, 0), 0,
                                    {remainder.terms.scale}, {part_total<F>(remainder.terms, part)});
      }
    }
    for (int v = 0; v < kPanelVecs; v++) sums[i][v] = own[0][v];
  }
}

// Column vectors of a tile of so many rows: those of a panel if their sums stay in registers. Else
// the tile passes over the panel more than once.
constexpr int vecs_of_tile(int rows) {
  return rows * kPanelVecs <= kDotRows * kDotVecs ? kPanelVecs : kDotVecs;
}
constexpr int num_passes(int rows) { return kPanelVecs / vecs_of_tile(rows); }

// Computes MR rows of a panel.
template <int Format, int MR>
void quantised_tile(const QuantisedProduct& product, int64_t row, SpreadPrefetch& prefetch,
                    Vec (*sums)[kPanelVecs]) {
  constexpr int NR = vecs_of_tile(MR);
  for (int j = 0; j < kPanelVecs; j += NR) {
    Vec part[MR][NR];
    fold_groups<Codes<Format>>(part, product, row, j, prefetch);
    for (int i = 0; i < MR; i++) {
      for (int v = 0; v < NR; v++) sums[i][j + v] = part[i][v];
    }
  }
}

using Tile = void (*)(const QuantisedProduct& product, int64_t row, SpreadPrefetch& prefetch,
                      Vec (*sums)[kPanelVecs]);

using RemainderFn = void (*)(const QuantisedProduct& product, int64_t row, int count,
                             Vec (*sums)[kPanelVecs]);

struct FormatTiles {
  Tile of_rows[kDotRows];  // index 0 has one row
  RemainderFn remainders;
};

template <int Format, int... Row>
constexpr FormatTiles tiles_of_format(std::integer_sequence<int, Row...>) {
  return {{quantised_tile<Format, Row + 1>...}, fold_remainders<Format>};
}

struct Tiles {
  FormatTiles of_formats[kNumCodeFormats];
};

template <int... Format>
constexpr Tiles make_tiles(std::integer_sequence<int, Format...>) {
  return {{tiles_of_format<Format>(std::make_integer_sequence<int, kDotRows>())...}};
}

constexpr Tiles kCodeTiles = make_tiles(std::make_integer_sequence<int, kNumCodeFormats>());

// The row tiles of a block: tile t has rows [t * rows / tiles, (t + 1) * rows / tiles).
struct TileRange {
  int64_t begin, end, rows, tiles;

  int64_t first_row(int64_t tile) const { return tile * rows / tiles; }
  int count(int64_t tile) const { return int(first_row(tile + 1) - first_row(tile)); }
  int64_t passes() const {
    int64_t passes = 0;
    for (int64_t tile = begin; tile < end; tile++) passes += num_passes(count(tile));
    return passes;
  }
};

// Computes units [begin, end), divided into row tiles and row blocks as in kernels/linear.h.
template <class MakeEpilogue>
inline void run_code_panels(const void* x, const void* w, const Grid& grid, int64_t begin,
                            int64_t end, Worker& worker, const MakeEpilogue& make_epilogue) {
  const int64_t rows = grid.rows, tiles = ceil_div(rows, kDotRows);
  QuantisedProduct product{static_cast<const uint8_t*>(x), nullptr, grid.k};
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t index = unit % grid.panels, block = unit / grid.panels;
    const CodePanel panel = code_panel(w, index);
    product.w = panel.data;
    auto epilogue = make_epilogue(index);
    const TileRange range{block * tiles / grid.row_blocks, (block + 1) * tiles / grid.row_blocks,
                          rows, tiles};
    const int64_t passes = range.passes();
    SpreadPrefetch prefetch =
        prefetch_of_unit(panel, passes, UnitPlace(unit, grid, worker), worker);
    const char* start = prefetch.at;
    int64_t done = 0;
    const FormatTiles& tile_of = kCodeTiles.of_formats[panel.format];
    for (int64_t tile = range.begin; tile < range.end; tile++) {
      const int64_t row = range.first_row(tile);
      const int count = range.count(tile);
      Vec sums[kDotRows][kPanelVecs];
      tile_of.of_rows[count - 1](product, row, prefetch, sums);
      tile_of.remainders(product, row, count, sums);
      for (int i = 0; i < count; i++) epilogue(row + i, sums[i]);
      done += num_passes(count);
      if (prefetch.bytes_per_step != 0) prefetch.at = start + done * panel.bytes / passes;
    }
  }
}

// How the kernels of kernels/linear.h and kernels/experts.h multiply weights of codes.
struct CodeProduct {
  static const void* row(const void* x, int64_t row, int64_t k) {
    return static_cast<const uint8_t*>(x) + row * code_row_bytes(k);
  }
  static const void* expert(const void* w, int64_t expert, int64_t, int64_t) {
    return static_cast<const uint8_t*>(w) + expert * codes_header(w).num_bytes();
  }
  template <class MakeEpilogue>
  static void run(const void* x, const void* w, const Grid& grid, int64_t begin, int64_t end,
                  Worker& worker, const MakeEpilogue& make_epilogue) {
    run_code_panels(x, w, grid, begin, end, worker, make_epilogue);
  }
};

// The elements of a group, zero beyond K.
struct GroupValues {
  Vec low, high;
};

// Group g of a row of k elements, read in an order if there is one.
template <class T>
inline GroupValues load_group(const T* x, const int32_t* order, int64_t k, int64_t g) {
  const int64_t at = g * kGroup, count = k - at < kGroup ? k - at : kGroup;
  const T* group = x + at;
  T gathered[kGroup];
  if (order != nullptr) {
    for (int64_t i = 0; i < count; i++) gathered[i] = x[order[at + i]];
    group = gathered;
  }
  GroupValues values{load_some(group, int(count < kLanes ? count : kLanes)), zero()};
  if (count > kLanes) values.high = load_some(group + kLanes, int(count - kLanes));
  return values;
}

// Returns the largest magnitude, or 0 if all codes are 0.
inline float quantise_group(const GroupValues& values, int8_t* codes, GroupTerms& terms) {
  const VecI magnitude = set1_i(0x7fffffff);
  uint32_t largest_bits = reduce_max_u(
      max_u(and_i(as_int(values.low), magnitude), and_i(as_int(values.high), magnitude)));
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof(largest));
  if (largest_bits < kSmallestLargest || largest_bits >= 0x7f800000u) {
    __builtin_memset(codes, 0, kGroup);
    terms = {largest_bits < kSmallestLargest ? 0.0f : __builtin_nanf(""), {0, 0}};
    return 0.0f;
  }
  Vec inverse = set1(127.0f / largest);
  const Vec low = round_even(mul(values.low, inverse));
  const Vec high = round_even(mul(values.high, inverse));
  store_codes(codes, low);
  store_codes(codes + kLanes, high);
  terms = {largest / 127.0f, {int16_t(reduce_add(low)), int16_t(reduce_add(high))}};
  return largest;
}

// What codes leave of elements whose largest magnitude is `largest`.
inline Vec remainder_of(Vec x, float largest) {
  return fnma(round_even(mul(x, set1(127.0f / largest))), set1(largest / 127.0f), x);
}

template <class T>
inline void quantise_row(const T* x, const int32_t* order, int64_t k, uint8_t* out) {
  const int64_t groups = ceil_div(k, kGroup);
  uint8_t *all_terms = out + groups * kGroup, *remainders = out + remainders_at(k);
  for (int64_t begin = 0; begin < groups; begin += kRemainderSpan) {
    const int64_t end = begin + kRemainderSpan < groups ? begin + kRemainderSpan : groups;
    Remainder remainder{{}, {}, begin};
    float most = 0.0f;
    for (int64_t g = begin; g < end; g++) {
      GroupTerms terms;
      auto* codes = reinterpret_cast<int8_t*>(out + g * kGroup);
      const float largest = quantise_group(load_group(x, order, k, g), codes, terms);
      __builtin_memcpy(all_terms + g * int64_t(sizeof(terms)), &terms, sizeof(terms));
      if (largest > most) {
        most = largest;
        remainder.group = g;
      }
    }
    if (most > 0.0f) {
      const GroupValues values = load_group(x, order, k, remainder.group);
      quantise_group({remainder_of(values.low, most), remainder_of(values.high, most)},
                     remainder.codes, remainder.terms);
    }
    __builtin_memcpy(remainders, &remainder, sizeof(remainder));
    remainders += sizeof(remainder);
  }
}

// A unit is one row.
template <class T>
void quantise_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const QuantiseTask*>(context);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(task.x) + row * task.k;
    const int32_t* order = task.orders == nullptr ? nullptr : task.orders[row];
    quantise_row(x, order, task.k, task.out + row * code_row_bytes(task.k));
  }
}

// Element i of a panel's column.
inline float code_element(const CodePanel& panel, int64_t k, int64_t column, int64_t i) {
  const CodeFormat format = kCodeFormats[panel.format];
  const uint8_t* group = panel.data + format.groups_at(k) + i / kGroup * format.group_bytes();
  const uint8_t* factors = panel.data + i / kNested * format.factor_bytes();
  const int64_t within = i % kGroup, lane = within / format.group * kPanel + column;
  // A scale, or with `which` 1 an offset.
  const auto scale_at = [&](int64_t bytes, int which) {
    const uint8_t* at = group + bytes + lane * format.scale_size();
    if (format.scale == ScaleType::kF32) return *reinterpret_cast<const float*>(at);
    if (format.scale == ScaleType::kF16) {
      return f16_to_f32(*reinterpret_cast<const uint16_t*>(at));
    }
    if (format.scale == ScaleType::kBf16) {
      const uint32_t raw = uint32_t(*reinterpret_cast<const uint16_t*>(at)) << 16;
      float value;
      __builtin_memcpy(&value, &raw, sizeof(value));
      return value;
    }
    const auto* factor = reinterpret_cast<const uint16_t*>(factors) + which * kPanel + column;
    return f16_to_f32(*factor) * float(int(*at) - 128);
  };
  int code;
  if (format.bits == 8) {
    code = group[(within / 4 * kPanel + column) * 4 + within % 4] - 128;
  } else {
    const int64_t in_part = within % format.group;
    const uint8_t* part = group + within / format.group * format.code_bytes() / format.num_parts();
    const int byte = part[(in_part / 8 * kPanel + column) * 4 + in_part % 4];
    code = in_part % 8 < 4 ? byte & 15 : byte >> 4;
    if (const int above = format.bits - 4; above > 0) {
      const int highest = part[format.nibble_bytes() + column * 4 + in_part % 4];
      code |= (highest >> in_part / 4 * above & ((1 << above) - 1)) << 4;
    }
    if (format.is_mxfp4()) {
      code = kDoubledE2m1[code];
    } else if (format.correction == Correction::kNone) {
      code -= format.middle();
    }
  }
  if (format.correction == Correction::kZeroPoint) code -= group[format.corrections_at() + lane];
  const float value = float(code) * scale_at(format.code_bytes(), 0);
  if (format.correction != Correction::kOffset) return value;
  return value + scale_at(format.corrections_at(), 1);
}

// A unit is one row of the embedding.
inline void quantised_embed_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const EmbedTask*>(context);
  for (int64_t row = begin; row < end; row++) {
    float* out = task.out + row * task.width;
    int64_t id = task.token_ids[row];
    bool is_token = id >= 0 && id < task.vocab;
    const CodePanel panel = code_panel(task.table, is_token ? id / kPanel : 0);
    const int32_t* order = input_order(task.table);
    for (int64_t i = 0; i < task.width; i++) {
      const float value = is_token ? code_element(panel, task.width, id % kPanel, i) : 0.0f;
      out[order == nullptr ? i : order[i]] = value * task.scale;
    }
  }
}

// The register tile of narrow codes without the loads of weights: the upper bound of all products.
inline void multiply_codes_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const MultiplyTask*>(context);
  const auto* seeds = static_cast<const uint8_t*>(task.seeds);
  NarrowDots dots[kDotRows][kDotVecs];
  for (int i = 0; i < kDotRows; i++) {
    for (int j = 0; j < kDotVecs; j++) {
      dots[i][j] = NarrowDots::begin(set1_i(uint32_t(i * kDotVecs + j)));
    }
  }
  NarrowDots::Codes weights[2];
  load_nibbles(seeds, weights[0], weights[1]);
  for (int64_t step = 0; step < (end - begin) * task.steps; step++) {
#pragma GCC unroll 8
    for (int i = 0; i < kDotRows; i++) {
      // Read again, as products of the same codes would be computed once.
      asm volatile("" : "+r"(seeds));
      const CodeOperand operand = broadcast_codes(reinterpret_cast<const int8_t*>(seeds));
#pragma GCC unroll 2
      for (int j = 0; j < kDotVecs; j++) dots[i][j].add(weights[0], operand);
    }
  }
  VecI results[kDotRows][kDotVecs];  // as an address of `dots` would keep them in memory
  for (int i = 0; i < kDotRows; i++) {
    for (int j = 0; j < kDotVecs; j++) results[i][j] = dots[i][j].end(set1_i(0));
  }
  observe(results);
  constexpr int64_t kPerStep = 2 * 4 * kLanes * kDotRows * kDotVecs;
  __atomic_fetch_add(task.operations, (end - begin) * task.steps * kPerStep, __ATOMIC_RELAXED);
}

// How a table multiplies: the rows of its tiles, and its roofline.
struct ProductLimits {
  int max_rows;
  UnitFn multiply;
  const int* (*least_tile_rows)();
};

template <class P>
constexpr IntegerKernels make_integer_kernels(const char* isa, const ProductLimits& limits) {
  return {isa,
          limits.max_rows,
          {quantise_units<bf16>, quantise_units<float>},
          limits.multiply,
          {append_units<CodeKv<bf16>>, append_units<CodeKv<float>>},
          {attend_units<CodeKv<bf16>>, attend_units<CodeKv<float>>},
          {merge_units<bf16>, merge_units<float>},
          {weigh_key_units<CodeKv<bf16>>, weigh_key_units<CodeKv<float>>},
          quantised_embed_units,
          {linear_units<P, bf16>, linear_units<P, float>},
          {gated_units<P, bf16>, gated_units<P, float>},
          logits_units<P>,
          {grouped_gated_units<P, bf16>, grouped_gated_units<P, float>},
          grouped_linear_units<P>,
          {combine_units<bf16>, combine_units<float>},
          {head_linear_units<P, bf16>, head_linear_units<P, float>},
          limits.least_tile_rows};
}

constexpr IntegerKernels make_integer_kernels(const char* isa) {
  return make_integer_kernels<CodeProduct>(isa, {kDotRows, multiply_codes_units, nullptr});
}

}  // namespace cadenza::CADENZA_ISA
