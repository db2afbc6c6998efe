// The register tile of every matrix product: MR rows of x times NR sixteen-column vectors.
#pragma once

#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

// A range to prefetch, spread evenly over the steps of the reduction.
struct SpreadPrefetch {
  const char* at = nullptr;
  int64_t bytes_per_step = 0;
};

[[gnu::always_inline]] inline void prefetch_step(SpreadPrefetch& prefetch) {
  if (prefetch.bytes_per_step == 0) return;
  __builtin_prefetch(prefetch.at, 0, 3);
  if (prefetch.bytes_per_step > 64) __builtin_prefetch(prefetch.at + 64, 0, 3);
  prefetch.at += prefetch.bytes_per_step;
}

template <int MR, int NR>
[[gnu::always_inline]] inline void clear(Vec (&acc)[MR][NR]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) acc[i][j] = zero();
}

template <class T, int MR, int NR>
[[gnu::always_inline]] inline void accumulate_step(Vec (&acc)[MR][NR],
                                                   const typename Elem<T>::Weight (&columns)[NR],
                                                   const T* const (&x)[(MR + 2) / 3],
                                                   int64_t row_stride) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
    auto operand = Elem<T>::broadcast(x[i / 3] + (i % 3) * row_stride);
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) acc[i][j] = Elem<T>::dot(acc[i][j], columns[j], operand);
  }
}

// acc[i][j] += sum over `steps` of x[i] · w[j]. Each element has one accumulator and one summation
// order, independent of MR and NR. One base pointer per three rows saves registers. Prefetches
// `prefetch`, and the same steps of the NR vectors `prefetch_w` if given.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void accumulate(Vec (&acc)[MR][NR], const T* x, int64_t row_stride,
                                              int64_t steps, const T* const (&w)[NR],
                                              int64_t w_stride, SpreadPrefetch prefetch = {},
                                              const T* const* prefetch_w = nullptr) {
  constexpr int kBases = (MR + 2) / 3;
  const T* base[kBases];
#pragma GCC unroll 16
  for (int g = 0; g < kBases; g++) base[g] = x + 3 * g * row_stride;
  int64_t offset = 0;
  for (int64_t s = 0; s < steps; s++) {
    typename Elem<T>::Weight columns[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) columns[j] = Elem<T>::weight(w[j] + offset);
    accumulate_step<T, MR, NR>(acc, columns, base, row_stride);
    if (prefetch_w != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) __builtin_prefetch(prefetch_w[j] + offset, 0, 3);
    }
    offset += w_stride;
#pragma GCC unroll 16
    for (int g = 0; g < kBases; g++) base[g] += kStep<T>;
    prefetch_step(prefetch);
  }
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(Count<n>) for 1 <= n <= Max.
template <int Max, class Body>
inline void with_count(int n, Body&& body) {
  if constexpr (Max == 1) {
    body(Count<1>{});
  } else {
    if (n == Max) return body(Count<Max>{});
    with_count<Max - 1>(n, body);
  }
}

}  // namespace cadenza::CADENZA_ISA
