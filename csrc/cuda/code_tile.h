// A tile of rows times a panel of codes: the arithmetic of core/quantised.h, bit for bit.
//
// A block of eight warps has one panel and 8 NR rows. The groups of K are taken in rounds, some by
// each warp, which leave the exact products of integers in shared memory; then each thread folds those
// of its column and its rows in ascending order. So K is read by all warps at once, and an element's
// sum still has one order. A warp's loads for the next round are on their way while a round is folded.
#pragma once

#include "cuda/code_rows.h"
#include "cuda/codes.h"
#include "cuda/panel_block.h"

namespace cadenza::cuda {

// Parts of groups that a round has at most.
template <int NR>
constexpr int kUnits = NR == 1 ? 32 : 16;
// Groups of a warp in a round: as many as keep 16 to 32 KiB of a block's weights on their way.
template <Unpacking U, int NR>
constexpr int kGroupsOfWarp = kUnits<NR> / kPanelWarps / kParts<U> < 16 / kCodeWords<U>
                                  ? kUnits<NR> / kPanelWarps / kParts<U>
                                  : 16 / kCodeWords<U>;

// Products of integers are exact; they begin at this, so that their bits are those of the float
// kMagicFloat + product.
constexpr int32_t kMagic = 0x4b400000;
constexpr float kMagicFloat = 12582912.0f;

// What a product folds beside the integers: the scale and the sum of a row's codes, two rows of a pair.
struct alignas(16) RowTerms {
  float scale[2], total[2];
};

template <int NR>
struct TileMemory {
  static constexpr int kPairs = 4 * NR;
  static constexpr int kStride = 2 * kPanel + 2;  // no two lanes store to one bank
  int32_t dots[kUnits<NR>][kPairs][kStride];      // [.., column, row of the pair]
  ColumnTerms columns[kUnits<NR>][kPanel];
  RowTerms rows[kUnits<NR>][kPairs];
  int32_t sources[8 * NR], targets[8 * NR];
};

struct TileRows {
  CodeRows rows;
  int groups, spans;
  int count;  // rows of the tile that are there; the sources of the others are those of its first
};

__device__ __forceinline__ int total_of(const GroupTerms& terms, int parts, int part) {
  return parts == 2 ? terms.totals[part] : terms.totals[0] + terms.totals[1];
}

// How a column's terms enter a sum.
struct Fold {
  bool has_offsets;

  __device__ __forceinline__ void add(float& sum, int32_t dot, const ColumnTerms& column, float scale,
                                      float total) const {
    const float biased = as_bits<float>(dot);
    if (has_offsets) {
      sum = fmaf((biased - kMagicFloat) * scale, column.scale, sum);
      sum = fmaf(total * scale, column.correction, sum);
    } else {
      // An integer below 2^24, as is the difference from it, so that nothing is rounded.
      const float exact = fmaf(-column.correction, total, biased) - kMagicFloat;
      sum = fmaf(exact * scale, column.scale, sum);
    }
  }
};

template <Unpacking U, int NR>
class CodeTile {
 public:
  __device__ __forceinline__ CodeTile(TileMemory<NR>& memory, const CodePanelView& panel, const TileRows& x)
      : memory_(memory),
        panel_(panel),
        x_(x),
        fold_{panel.entry().correction == Correction::kOffset},
        warp_(int(threadIdx.x) / kWarp),
        lane_(int(threadIdx.x) % kWarp) {}

  __device__ __forceinline__ void run(PanelSums<NR>& sums) {
    constexpr int kRound = kPanelWarps * kOfWarp;
    for (auto& pair : sums.of) pair[0] = pair[1] = 0.0f;
    Loaded loaded;
#pragma unroll
    for (int i = 0; i < kTermLoads; i++) load_rows(loaded, 0, i);
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) load_group(loaded, 0, i);
    for (int first = 0; first < x_.groups; first += kRound) {
      multiply(loaded, first);
      __syncthreads();
      fold_round(sums, min(kRound, x_.groups - first) * kPartsOf);
      __syncthreads();
    }
    for (int first = 0; first < x_.spans; first += kUnits<NR> / kPartsOf) {
      const int count = min(kUnits<NR> / kPartsOf, x_.spans - first);
      multiply_remainders(first, count);
      __syncthreads();
      fold_remainders(sums, first, count);
      __syncthreads();
    }
  }

 private:
  static constexpr int kPartsOf = kParts<U>;
  static constexpr int kOfWarp = kGroupsOfWarp<U, NR>;
  static constexpr int kRows = kRowsOfProduct * NR;
  static constexpr int kTermsOfWarp = kOfWarp * kRows;
  static constexpr int kTermLoads = (kTermsOfWarp + kWarp - 1) / kWarp;

  // A warp's groups of a round, as they are stored.
  struct Loaded {
    StoredCodes<U> codes[kOfWarp];
    uint2 x[kOfWarp][NR];
    StoredTerms columns[kOfWarp][kPartsOf];
    uint2 rows[kTermLoads];
  };

  __device__ __forceinline__ int group_of(int first, int i) const { return first + warp_ * kOfWarp + i; }

  __device__ __forceinline__ const uint2* codes_of(int64_t row, int64_t group) const {
    return reinterpret_cast<const uint2*>(x_.rows.codes + (row * x_.groups + group) * kGroup) + lane_ % 4;
  }

  // Loads a warp's group i of the round that begins at group `first`, if there is one.
  __device__ __forceinline__ void load_group(Loaded& loaded, int first, int i) const {
    const int64_t group = group_of(first, i);
    if (group >= x_.groups) return;
    load_codes<U>(loaded.codes[i], panel_.groups + group * panel_.entry().group_bytes, lane_);
#pragma unroll
    for (int part = 0; part < kPartsOf; part++) {
      loaded.columns[i][part] = load_terms(panel_, group, part, lane_);
    }
#pragma unroll
    for (int r = 0; r < NR; r++) {
      loaded.x[i][r] = load_constant(codes_of(memory_.sources[r * kRowsOfProduct + lane_ / 4], group));
    }
  }

  // Some of the terms of the warp's groups and all rows, one for each lane.
  __device__ __forceinline__ void load_rows(Loaded& loaded, int first, int i) const {
    const int at = i * kWarp + lane_, group = group_of(first, at / kRows);
    if (at >= kTermsOfWarp || group >= x_.groups) return;
    const int64_t row = memory_.sources[at % kRows];
    loaded.rows[i] = load_constant(reinterpret_cast<const uint2*>(x_.rows.terms + row * x_.groups + group));
  }

  __device__ __forceinline__ void multiply_group(const Loaded& loaded, int first, int i) {
    if (group_of(first, i) >= x_.groups) return;
    const int unit = (warp_ * kOfWarp + i) * kPartsOf;
    uint32_t a[2][4];
    unpack_all<U>(loaded.codes[i], lane_, a);
#pragma unroll
    for (int part = 0; part < kPartsOf; part++) {
      memory_.columns[unit + part][lane_] = terms_of(panel_.entry(), loaded.columns[i][part]);
#pragma unroll
      for (int r = 0; r < NR; r++) multiply_part(a, loaded.x[i][r], part, unit + part, r * 4);
    }
  }

  __device__ __forceinline__ void store_rows(const Loaded& loaded, int first, int i) {
    const int at = i * kWarp + lane_, within = at / kRows, row = at % kRows;
    if (at >= kTermsOfWarp || group_of(first, within) >= x_.groups) return;
    const GroupTerms terms = as_bits<GroupTerms>(loaded.rows[i]);
#pragma unroll
    for (int part = 0; part < kPartsOf; part++) {
      RowTerms& to = memory_.rows[(warp_ * kOfWarp + within) * kPartsOf + part][row / 2];
      to.scale[row % 2] = terms.scale;
      to.total[row % 2] = float(total_of(terms, kPartsOf, part));
    }
  }

  // What a round leaves in shared memory; each register is loaded for the next one once it was used.
  __device__ __forceinline__ void multiply(Loaded& loaded, int first) {
    constexpr int kRound = kPanelWarps * kOfWarp;
#pragma unroll
    for (int i = 0; i < kTermLoads; i++) {
      store_rows(loaded, first, i);
      load_rows(loaded, first + kRound, i);
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; i++) {
      multiply_group(loaded, first, i);
      load_group(loaded, first + kRound, i);
    }
  }

  // The lane's codes of x in a part of a group: lanes 0 and 1 of four have those of the first.
  __device__ __forceinline__ void take_part(uint32_t (&b)[2], uint2 x, int part) const {
    const bool is_in_part = kPartsOf == 1 || lane_ % 4 / 2 == part;
    b[0] = is_in_part ? x.x : 0;
    b[1] = is_in_part ? x.y : 0;
  }

  __device__ __forceinline__ void multiply_part(const uint32_t (&a)[2][4], uint2 x, int part, int unit,
                                                int first_pair) {
    uint32_t b[2];
    take_part(b, x, part);
    int32_t* to = memory_.dots[unit][first_pair + lane_ % 4] + lane_ / 4 * 8;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int32_t d[4];
      warp_mma_int8_from(kMagic, d, a[j], b);
      *reinterpret_cast<uint2*>(to + 4 * j) = make_uint2(uint32_t(d[0]), uint32_t(d[1]));
      *reinterpret_cast<uint2*>(to + 4 * j + 2) = make_uint2(uint32_t(d[2]), uint32_t(d[3]));
    }
  }

  __device__ __forceinline__ void fold_round(PanelSums<NR>& sums, int units) const {
#pragma unroll
    for (int p = 0; p < PanelSums<NR>::kPairs; p++) {
      const int pair = warp_ + kPanelWarps * p;
      if (pair >= TileMemory<NR>::kPairs || 2 * pair >= x_.count) break;
#pragma unroll 4
      for (int unit = 0; unit < units; unit++) {
        const auto dots = *reinterpret_cast<const uint2*>(memory_.dots[unit][pair] + 2 * lane_);
        const ColumnTerms column = memory_.columns[unit][lane_];
        const RowTerms rows = memory_.rows[unit][pair];
        fold_.add(sums.of[p][0], int32_t(dots.x), column, rows.scale[0], rows.total[0]);
        fold_.add(sums.of[p][1], int32_t(dots.y), column, rows.scale[1], rows.total[1]);
      }
    }
  }

  __device__ __forceinline__ const Remainder* remainder_of(int row, int span) const {
    return x_.rows.remainders + int64_t(memory_.sources[row]) * x_.spans + span;
  }

  // A row's second codes are multiplied by the codes of its own groups, in a product whose other rows are 0.
  __device__ __forceinline__ void multiply_remainders(int first, int count) {
    for (int row = warp_; row < x_.count; row += kPanelWarps) {
      const int pair = row / 2, within = row % kRowsOfProduct;
#pragma unroll 2
      for (int span = 0; span < count; span++) {
        const Remainder* remainder = remainder_of(row, first + span);
        const int64_t group = remainder->group;
        StoredCodes<U> codes;
        load_codes<U>(codes, panel_.groups + group * panel_.entry().group_bytes, lane_);
        uint2 x = reinterpret_cast<const uint2*>(remainder->codes)[lane_ % 4];
        if (lane_ / 4 != within) x = make_uint2(0, 0);
        uint32_t a[2][4];
        unpack_all<U>(codes, lane_, a);
#pragma unroll
        for (int part = 0; part < kPartsOf; part++) {
          uint32_t b[2];
          take_part(b, x, part);
          int32_t* to = memory_.dots[span * kPartsOf + part][pair] + lane_ / 4 * 8 + row % 2;
#pragma unroll
          for (int j = 0; j < 2; j++) {
            int32_t d[4];
            warp_mma_int8_from(kMagic, d, a[j], b);
            if (lane_ % 4 == within / 2) {
              to[4 * j] = row % 2 == 0 ? d[0] : d[1];
              to[4 * j + 2] = row % 2 == 0 ? d[2] : d[3];
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void fold_remainders(PanelSums<NR>& sums, int first, int count) const {
#pragma unroll
    for (int p = 0; p < PanelSums<NR>::kPairs; p++) {
      const int pair = warp_ + kPanelWarps * p;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = 2 * pair + i;
        if (pair >= TileMemory<NR>::kPairs || row >= x_.count) break;
        for (int span = 0; span < count; span++) {
          const Remainder* remainder = remainder_of(row, first + span);
          const GroupTerms terms = remainder->terms;
#pragma unroll
          for (int part = 0; part < kPartsOf; part++) {
            const StoredTerms stored = load_terms(panel_, remainder->group, part, lane_);
            fold_.add(sums.of[p][i], memory_.dots[span * kPartsOf + part][pair][2 * lane_ + i],
                      terms_of(panel_.entry(), stored), terms.scale,
                      float(total_of(terms, kPartsOf, part)));
          }
        }
      }
    }
  }

  TileMemory<NR>& memory_;
  const CodePanelView panel_;
  const TileRows x_;
  const Fold fold_;
  const int warp_, lane_;
};

}  // namespace cadenza::cuda
