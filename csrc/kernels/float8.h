// Products with e4m3 weights: the arithmetic of core/float8.h.
//
// Units, tiles, epilogues and prefetching are those of kernels/linear.h and kernels/experts.h, with
// codes that are decoded within the register tile.
#pragma once

#include "kernels/experts.h"
#include "vec/float8.h"

namespace cadenza::CADENZA_ISA {

#ifdef CADENZA_VEC_BF16_DOT
// A word of two codes' values is multiplied like one of a dense weight.
template <>
struct Elem<Float8<bf16>> : Elem<bf16> {
  template <int P>
  static Weight weight(const Float8<bf16>* p) {
    return as_pairs(load_float8(&p->code));
  }
};
#else
template <>
struct Elem<Float8<bf16>> : Elem<bf16> {
  template <int P>
  static Weight weight(const Float8<bf16>* p) {
    return widen<P>(load_float8(&p->code));
  }
};
#endif

template <>
struct Elem<Float8<float>> : Elem<float> {
  static constexpr int kProducts = 2;
  template <int P>
  static Weight weight(const Float8<float>* p) {
    VecI words = load_float8(&p->code);
    return as_float(P == 0 ? shl<16>(words) : and_i(words, set1_i(0xffff0000u)));
  }
};

template <class T>
struct WeightTraits<Float8<T>> {
  using Act = T;
  static constexpr WeightFormat kFormat = WeightFormat::kFloat8;
  static constexpr int kTileRows = kFloat8Rows;
};

// Prefetches `steps` steps at once.
[[gnu::always_inline]] inline void prefetch_steps(SpreadPrefetch& prefetch, int64_t steps) {
  for (int64_t i = 0; i < steps; i++) prefetch_step(prefetch);
}

// Reduces each block of K and folds it.
template <class T>
struct Reduction<Float8<T>> {
  template <int MR, int NR>
  [[gnu::always_inline]] static void columns(Vec (&sums)[MR][NR],
                                             const PanelProduct<Float8<T>>& product, int64_t row,
                                             int column, SpreadPrefetch prefetch,
                                             UpcomingBlocks* upcoming) {
    const Input<Float8<T>>* x = product.x + row * product.row_stride;
    const uint8_t* block = &product.w->code;
    clear(sums);
    for (int64_t begin = 0; begin < product.k; begin += kFloat8Block) {
      const int64_t left = product.k - begin, count = left < kFloat8Block ? left : kFloat8Block;
      prefetch_steps(prefetch, kFloat8ScaleBytes / kFloat8StepBytes);
      const auto* codes = reinterpret_cast<const Float8<T>*>(block + kFloat8ScaleBytes);
      Vec acc[MR][NR];
      reduce_run<Float8<T>, MR, NR>(acc, x + begin, product.row_stride, codes + column * 2, count,
                                    prefetch, upcoming);
      const float* scales = reinterpret_cast<const float*>(block) + column;
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) {
        const Vec scale = load(scales + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) sums[i][j] = fma(acc[i][j], scale, sums[i][j]);
      }
      const int64_t steps = ceil_div(count, 2);
      prefetch.at += steps * prefetch.bytes_per_step;
      block += kFloat8ScaleBytes + steps * kFloat8StepBytes;
    }
  }
};

constexpr Float8Kernels make_float8_kernels() {
  using Bf16 = FloatProduct<Float8<bf16>>;
  using F32 = FloatProduct<Float8<float>>;
  return {kFloat8Rows,
          {linear_units<Bf16, bf16>, linear_units<F32, float>},
          {gated_units<Bf16, bf16>, gated_units<F32, float>},
          {logits_units<Bf16>, logits_units<F32>},
          {grouped_gated_units<Bf16, bf16>, grouped_gated_units<F32, float>},
          {grouped_linear_units<Bf16>, grouped_linear_units<F32>},
          {combine_units<bf16>, combine_units<float>},
          {head_linear_units<Bf16, bf16>, head_linear_units<F32, float>}};
}

}  // namespace cadenza::CADENZA_ISA
