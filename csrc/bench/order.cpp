// Products of bf16 in the order of AMX's tiles (vec/tile.h), to be timed beside those of a table
// without bf16 instructions: within each 32 elements of K one chain of fused multiply-adds over the
// even elements and one over the odd ones, both ascending from zero; then total = total + (even +
// odd). Only for K that are multiples of 32. Compiled once a table: make order-avx2.
//
// Both chains of as many columns as fit are in registers, the totals in the first-level cache. Of the
// schedules that were tried this was the fastest. Two column vectors of twelve rows, with a pass over
// the block for each chain, or for each half of the rows, took 1.07 and 1.08 times as long as products
// in ascending order (avx512, 256 tokens of a prompt of the 135M shape).
#include "kernels/linear.h"

namespace cadenza {

// A weight's element, packed as bf16, which is multiplied in the order of tiles.
struct InTileOrder {
  bf16 value;
};
template <>
inline constexpr int kStep<InTileOrder> = 2;

namespace CADENZA_ISA {

template <>
struct Elem<InTileOrder> : Elem<bf16> {};

template <>
struct WeightTraits<InTileOrder> {
  using Act = bf16;
  static constexpr WeightFormat kFormat = WeightFormat::kBf16;
  static constexpr int kTileRows = kMaxRows;
};

// A group of columns' sums of even and of odd elements, the weights by which they are multiplied, and
// how many groups of chains the registers hold.
#ifdef CADENZA_VEC_AVX512

struct Chains {
  Vec even, odd;
};
constexpr int kColumnGroups = 1, kMaxChains = 12, kUnrolledSteps = 4;
inline Chains zero_chains() { return {zero(), zero()}; }
inline Chains chain_weights(VecI words, int) {
  return {as_float(shl<16>(words)), as_float(and_i(words, set1_i(0xffff0000u)))};
}
// x: an even element and the odd one behind it.
inline void add_products(Chains& chains, const Chains& w, const float* x) {
  chains.even = fma(w.even, set1(x[0]), chains.even);
  chains.odd = fma(w.odd, set1(x[1]), chains.odd);
}
inline void add_chains(Vec& total, const Chains& chains, int) {
  total = add(total, add(chains.even, chains.odd));
}

#else

// Eight columns, even and odd side by side as the words of a weight have them: columns 0, 1, 4 and 5,
// then 2, 3, 6 and 7. Unpacking behind zeros widens words; a broadcast of two elements serves four
// columns.
struct Chains {
  __m256 low, high;
};
constexpr int kColumnGroups = 2, kMaxChains = 6, kUnrolledSteps = 1;
inline Chains zero_chains() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Chains chain_weights(VecI words, int group) {
  const __m256i own = group == 0 ? words.lo : words.hi, none = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, own)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, own))};
}
inline void add_products(Chains& chains, const Chains& w, const float* x) {
  double pair;
  memcpy(&pair, x, sizeof(pair));
  const __m256 both = _mm256_castpd_ps(_mm256_set1_pd(pair));
  chains.low = _mm256_fmadd_ps(w.low, both, chains.low);
  chains.high = _mm256_fmadd_ps(w.high, both, chains.high);
}
inline void add_chains(Vec& total, const Chains& chains, int group) {
  __m256& own = group == 0 ? total.lo : total.hi;
  own = _mm256_add_ps(own, _mm256_add_ps(_mm256_shuffle_ps(chains.low, chains.high, 0x88),
                                         _mm256_shuffle_ps(chains.low, chains.high, 0xdd)));
}

#endif

constexpr int kBlockSteps = 16;  // steps of K in a block, of two elements
constexpr int64_t kPanelStride = kPanel * 2;

// Groups of columns of NR vectors whose chains are in registers at a time.
template <int MR, int NR>
constexpr int chain_groups() {
  int groups = NR * kColumnGroups;
  while (groups > 1 && MR * groups > kMaxChains) groups /= 2;
  return groups;
}

// Where a block of a tile's operands begins: rows of x, three to a base, and the tile's columns.
template <int MR>
struct BlockOperands {
  const float* x[(MR + 2) / 3];
  int64_t row_stride;
  const InTileOrder* w;
};

// chains += the products of one step, with the column groups from FIRST on.
template <int FIRST, int MR, int G>
[[gnu::always_inline]] inline void multiply_step(Chains (&chains)[MR][G],
                                                 BlockOperands<MR>& operands) {
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) {
    const InTileOrder* words = operands.w + (FIRST + g) / kColumnGroups * kLanes * 2;
    const Chains weights = chain_weights(load_words(&words->value), (FIRST + g) % kColumnGroups);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      add_products(chains[i][g], weights, operands.x[i / 3] + i % 3 * operands.row_stride);
    }
  }
#pragma GCC unroll 16
  for (auto& base : operands.x) base += 2;
  operands.w += kPanelStride;
}

// Prefetches what `steps` steps do.
[[gnu::always_inline]] inline void prefetch_together(SpreadPrefetch& prefetch, int64_t steps) {
  const int64_t bytes = steps * prefetch.bytes_per_step;
#pragma GCC unroll 1
  for (int64_t at = 0; at < bytes; at += kCacheLine) prefetch.line(at);
  prefetch.at += bytes;
}

// The same of the steps of a block. Prefetches once in several: few instructions are left for it beside the
// multiplications of a small tile.
template <int FIRST, int MR, int G>
[[gnu::always_inline]] inline void multiply_block(Chains (&chains)[MR][G],
                                                  BlockOperands<MR> operands,
                                                  SpreadPrefetch& prefetch, const char* chunk) {
  constexpr int kTogether = 4;
  for (int s = 0; s < kBlockSteps; s += kTogether) {
#pragma GCC unroll kUnrolledSteps
    for (int i = 0; i < kTogether; i++) multiply_step<FIRST>(chains, operands);
    if constexpr (FIRST == 0) {
      if (chunk != nullptr) {
        __builtin_prefetch(chunk + s / 2 * kCacheLine, 0, 2);
        __builtin_prefetch(chunk + (s / 2 + 1) * kCacheLine, 0, 2);
      }
      prefetch_together(prefetch, kTogether);
    }
  }
}

// Adds a block to the totals of the column groups from FIRST on.
template <int FIRST, int MR, int NR>
[[gnu::always_inline]] inline void add_block(Vec (&total)[MR][NR],
                                             const BlockOperands<MR>& operands,
                                             SpreadPrefetch& prefetch, const char* chunk) {
  constexpr int G = chain_groups<MR, NR>();
  Chains chains[MR][G];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) chains[i][g] = zero_chains();
  multiply_block<FIRST>(chains, operands, prefetch, chunk);
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      constexpr int kPerVec = kColumnGroups;
      add_chains(total[i][(FIRST + g) / kPerVec], chains[i][g], (FIRST + g) % kPerVec);
    }
  if constexpr (FIRST + G < NR * kColumnGroups) {
    add_block<FIRST + G>(total, operands, prefetch, chunk);
  }
}

template <>
struct Reduction<InTileOrder> {
  template <int MR, int NR>
  [[gnu::always_inline]] static void columns(Vec (&total)[MR][NR],
                                             const PanelProduct<InTileOrder>& product, int64_t row,
                                             int column, SpreadPrefetch prefetch,
                                             UpcomingBlocks* upcoming) {
    const float* x = product.x + row * product.row_stride;
    BlockOperands<MR> operands{{}, product.row_stride, product.w + column * 2};
    clear(total);
    for (int64_t k = 0; k < product.k; k += 2 * kBlockSteps) {
#pragma GCC unroll 16
      for (int g = 0; g < (MR + 2) / 3; g++) operands.x[g] = x + k + 3 * g * product.row_stride;
      const char* chunk = upcoming != nullptr ? upcoming->take_chunk() : nullptr;
      add_block<0>(total, operands, prefetch, chunk);
      operands.w += kBlockSteps * kPanelStride;
    }
  }
};

using TileOrderProduct = FloatProduct<InTileOrder>;

// Only the activation that a step of the benchmark has.
void silu_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const GatedUnits*>(context);
  gated_units_as<TileOrderProduct, bf16, Activation::kSilu>(units, begin, end, worker);
}

}  // namespace CADENZA_ISA

// Puts products in the order of tiles into the table of the same ISA.
void use_tile_order(KernelTable& table) {
  using namespace CADENZA_ISA;
  table.linear[0] = linear_units<TileOrderProduct, bf16>;
  table.gated[0] = silu_units;
  table.logits[0] = logits_units<TileOrderProduct>;
}

}  // namespace cadenza
