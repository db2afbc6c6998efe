// A tile's queries as codes, and their dots with keys: the arithmetic of core/kv_codes.h.
#pragma once

#include "core/kv_codes.h"
#include "core/quantised.h"
#include "kernels/kv.h"
#include "vec/dot.h"

namespace cadenza::CADENZA_ISA {

// The largest magnitude of a vector's elements: NaN if one is NaN. Without codes they are all 0,
// and the scale is 0, or NaN beside an element that is not finite.
struct Largest {
  uint32_t bits;

  template <class T>
  static Largest of(const T* x, int64_t size) {
    const VecI magnitude = set1_i(0x7fffffff);
    VecI most = set1_i(0);
    for (int64_t d = 0; d < size; d += kLanes) {
      most = max_u(most, and_i(as_int(Elem<T>::load(x + d)), magnitude));
    }
    return {reduce_max_u(most)};
  }

  bool has_codes() const { return bits >= kSmallestLargest && bits < 0x7f800000u; }
  float scale_without_codes() const {
    return bits < kSmallestLargest ? 0.0f : __builtin_nanf("");
  }
  float value() const {
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(largest));
    return largest;
  }
};

// How the codes of queries lie: the coarse and the fine ones apart, in bytes; or together in 16
// bits, where two dots of bytes take longer than one of wider codes.
#if defined(CADENZA_VEC_AVX2) && !defined(__AVXVNNI__)

struct QueryLayout {
  QueryLayout(Arena& arena, int64_t count) : codes(arena.take<int16_t>(count)) {}

  void clear(int64_t at, int64_t size) { __builtin_memset(codes + at, 0, size_t(2 * size)); }
  void store(int64_t at, Vec coarse, Vec fine) {
    store_wide(codes + at, fma(coarse, set1(float(kFinePerCoarse)), fine));
  }
  // Sets the dots of MR queries from element `at` on, `size` apart, with the keys of NR sub-blocks;
  // `terms` are those of the queries. Prefetches `next`.
  template <int MR, int NR>
  [[gnu::always_inline]] void dot(VecI (&dots)[MR][NR], const CodeTerms* terms, int64_t at,
                                  int64_t size, const uint8_t* const* keys,
                                  const uint8_t* const* next) const {
    for (int j = 0; j < NR; j++) {
      dot_half<0>(dots, j, terms, codes + at, size, keys[j], next[j]);
      dot_half<1>(dots, j, terms, codes + at, size, keys[j], next[j]);
    }
  }

  // The dots with half of a sub-block's tokens.
  template <int HALF, int MR, int NR>
  [[gnu::always_inline]] static void dot_half(VecI (&dots)[MR][NR], int j, const CodeTerms* terms,
                                              const int16_t* queries, int64_t size,
                                              const uint8_t* keys, const uint8_t* next) {
    WideDots sums[MR] = {};
    for (int64_t d = 0; d < size; d += 4) {
      const WideCodes columns = load_wide(keys + d * kLanes + HALF * 32);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) add_wide(sums[i], columns, queries + i * size + d);
      if constexpr (HALF == 0) prefetch_kv(next + d * kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const __m256i bias = _mm256_set1_epi32(int(uint32_t(-128) * uint32_t(terms[i].sum)));
      (HALF == 0 ? dots[i][j].lo : dots[i][j].hi) = _mm256_add_epi32(columns_of(sums[i]), bias);
    }
  }

  int16_t* const codes;
};

#else

struct QueryLayout {
  QueryLayout(Arena& arena, int64_t count)
      : coarse_codes(arena.take<int8_t>(count)), fine_codes(arena.take<int8_t>(count)) {}

  void clear(int64_t at, int64_t size) {
    __builtin_memset(coarse_codes + at, 0, size_t(size));
    __builtin_memset(fine_codes + at, 0, size_t(size));
  }
  void store(int64_t at, Vec coarse, Vec fine) {
    store_codes(coarse_codes + at, coarse);
    store_codes(fine_codes + at, fine);
  }
  // Sets the dots of MR queries from element `at` on, `size` apart, with the keys of NR sub-blocks;
  // prefetches `next`.
  template <int MR, int NR>
  [[gnu::always_inline]] void dot(VecI (&dots)[MR][NR], const CodeTerms* terms, int64_t at,
                                  int64_t size, const uint8_t* const* keys,
                                  const uint8_t* const* next) const {
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) dots[i][j] = set1_i(0);
    add_dots(dots, coarse_codes + at, size, keys, next);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const VecI bias = set1_i(uint32_t(kCodeBias - 128) * uint32_t(terms[i].sum));
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++)
        dots[i][j] = add_i(mul_i(dots[i][j], set1_i(kFinePerCoarse)), bias);
    }
    add_dots(dots, fine_codes + at, size, keys, keys);
  }

  template <int MR, int NR>
  [[gnu::always_inline]] static void add_dots(VecI (&dots)[MR][NR], const int8_t* queries,
                                              int64_t size, const uint8_t* const* keys,
                                              const uint8_t* const* next) {
    for (int64_t d = 0; d < size; d += 4) {
      CodeVec columns[NR];
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) columns[j] = load_codes(keys[j] + d * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        CodeOperand codes = broadcast_codes(queries + i * size + d);
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) dots[i][j] = dot_codes(dots[i][j], columns[j], codes);
      }
      if (next == keys) continue;
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) prefetch_kv(next[j] + d * kLanes);
    }
  }

  int8_t* const coarse_codes;
  int8_t* const fine_codes;
};

#endif

// At most `capacity` queries of `size` elements.
class QueryCodes {
 public:
  QueryCodes(Arena& arena, int capacity, int64_t size)
      : layout_(arena, capacity * size), terms_(arena.take<CodeTerms>(capacity)), size_(size) {}

  float scale(int i) const { return terms_[i].scale; }

  // Quantises query i.
  void set(int i, const float* x) {
    const Largest largest = Largest::of(x, size_);
    if (!largest.has_codes()) {
      layout_.clear(i * size_, size_);
      terms_[i] = {largest.scale_without_codes(), 0};
      return;
    }
    const Vec inverse = set1(kMostCode / largest.value()), steps = set1(float(kFinePerCoarse));
    Vec coarse_sum = zero(), fine_sum = zero();
    for (int64_t d = 0; d < size_; d += kLanes) {
      const Vec exact = mul(load(x + d), inverse), coarse = round_even(exact);
      const Vec fine = round_even(mul(sub(exact, coarse), steps));
      layout_.store(i * size_ + d, coarse, fine);
      coarse_sum = add(coarse_sum, coarse);
      fine_sum = add(fine_sum, fine);
    }
    const int32_t sum = kFinePerCoarse * int32_t(reduce_add(coarse_sum));
    terms_[i] = {largest.value() / (kMostCode * float(kFinePerCoarse)),
                 sum + int32_t(reduce_add(fine_sum))};
  }

  // The dots of queries [row, row + MR) with the keys of NR sub-blocks; prefetches those of `next`.
  template <int MR, int NR>
  [[gnu::always_inline]] void dot(VecI (&dots)[MR][NR], int row, const uint8_t* const* keys,
                                  const uint8_t* const* next) const {
    layout_.dot(dots, terms_ + row, row * size_, size_, keys, next);
  }

 private:
  QueryLayout layout_;
  CodeTerms* const terms_;
  const int64_t size_;
};

}  // namespace cadenza::CADENZA_ISA
