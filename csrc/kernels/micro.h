// The register tile of every matrix product: MR rows of x times NR sixteen-column vectors.
#pragma once

#include "core/prefetch.h"
#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

// The caches into which a range is prefetched. A read from memory holds one of the few buffers of
// the first level's misses until it is done, also while the second level would have what is read
// next.
enum class CacheLevels {
  kFirst,
  kSecond,  // what would not stay in the first
  kBoth,    // first the second, and kFirstLevelLag bytes later the first
};
constexpr int64_t kFirstLevelLag = 8192;

// A range to prefetch, spread evenly over the steps of the reduction.
struct SpreadPrefetch {
  const char* at = nullptr;
  int64_t bytes_per_step = 0;
  CacheLevels levels = CacheLevels::kFirst;

  [[gnu::always_inline]] void line(int64_t offset) const {
    if (levels != CacheLevels::kFirst) __builtin_prefetch(at + offset, 0, 2);
    if (levels == CacheLevels::kFirst) __builtin_prefetch(at + offset, 0, 3);
    if (levels == CacheLevels::kBoth) __builtin_prefetch(at + offset - kFirstLevelLag, 0, 3);
  }
};

[[gnu::always_inline]] inline void prefetch_step(SpreadPrefetch& prefetch) {
  if (prefetch.bytes_per_step == 0) return;
  prefetch.line(0);
  if (prefetch.bytes_per_step > kCacheLine) prefetch.line(kCacheLine);
  prefetch.at += prefetch.bytes_per_step;
}

// Prefetches a line of KV, which is read once in a step, into the second level: attention of decode
// rows took 0.73 to 0.88 of the time that it took with the first, whose few buffers were the limit.
[[gnu::always_inline]] inline void prefetch_kv(const void* line) {
  __builtin_prefetch(line, 0, 2);
}

template <int MR, int NR>
[[gnu::always_inline]] inline void clear(Vec (&acc)[MR][NR]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) acc[i][j] = zero();
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// Column vectors of a tile of MR rows: `most`, or one where so many accumulators do not fit.
template <int MR>
constexpr int tile_vecs(int most) {
  return MR * most <= kMaxRows * kTileVecs ? most : 1;
}

// Calls body(Count<P>) for each multiply-add of a word, in ascending order.
template <class T, class Body>
[[gnu::always_inline]] inline void for_each_product(Body&& body) {
  body(Count<0>{});
  if constexpr (Elem<T>::kProducts == 2) body(Count<1>{});
}

// Adds one product to each accumulator of a tile. HELD column vectors are in registers at a time;
// x is read again for the next ones.
template <class T, int P, int HELD, int MR, int NR>
[[gnu::always_inline]] inline void accumulate_product(Vec (&acc)[MR][NR],
                                                      const Input<T>* const (&x)[(MR + 2) / 3],
                                                      int64_t row_stride, const T* const (&w)[NR],
                                                      int64_t w_offset) {
#pragma GCC unroll 4
  for (int first = 0; first < NR; first += HELD) {
    typename Elem<T>::Weight columns[HELD];
#pragma GCC unroll 4
    for (int j = 0; j < HELD; j++) {
      columns[j] = Elem<T>::template weight<P>(w[first + j] + w_offset);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const Input<T>* at = x[i / 3] + (i % 3) * row_stride + P;
      // Hides that this address was read before: the compiler would keep all MR values and spill.
      if (first > 0) asm("" : "+r"(at));
      auto operand = Elem<T>::broadcast(at);
#pragma GCC unroll 4
      for (int j = 0; j < HELD; j++) {
        acc[i][first + j] = Elem<T>::multiply_add(acc[i][first + j], columns[j], operand);
      }
    }
  }
}

// acc[i][j] += sum over `steps` of x[i] · w[j]. Each element has one accumulator and one summation
// order, independent of MR and NR. One base pointer per three rows saves registers. Prefetches
// `prefetch`, the same steps of the NR vectors `prefetch_w` if given, and half a line of `upcoming`
// at each step.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void accumulate(Vec (&acc)[MR][NR], const Input<T>* x,
                                              int64_t row_stride, int64_t steps,
                                              const T* const (&w)[NR], int64_t w_stride,
                                              SpreadPrefetch prefetch = {},
                                              const T* const* prefetch_w = nullptr,
                                              UpcomingBlocks* upcoming = nullptr) {
  constexpr int kBases = (MR + 2) / 3, kHeld = NR < kHeldVecs ? NR : kHeldVecs;
  const Input<T>* base[kBases];
#pragma GCC unroll 16
  for (int g = 0; g < kBases; g++) base[g] = x + 3 * g * row_stride;
  int64_t offset = 0;
  const char* chunk = nullptr;
  constexpr int64_t kStepsPerChunk = 2 * UpcomingBlocks::kChunk / kCacheLine;
  for (int64_t s = 0; s < steps; s++) {
    if (upcoming != nullptr && s % 2 == 0) {
      if (s % kStepsPerChunk == 0) chunk = upcoming->take_chunk();
      __builtin_prefetch(chunk + s % kStepsPerChunk / 2 * kCacheLine, 0, 2);
    }
    for_each_product<T>([&](auto p) __attribute__((always_inline)) {
      accumulate_product<T, decltype(p)::value, kHeld>(acc, base, row_stride, w, offset);
    });
    if (prefetch_w != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) prefetch_kv(prefetch_w[j] + offset);
    }
    offset += w_stride;
#pragma GCC unroll 16
    for (int g = 0; g < kBases; g++) base[g] += kStep<T>;
    prefetch_step(prefetch);
  }
}

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
