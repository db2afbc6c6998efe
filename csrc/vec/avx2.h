// Sixteen f32 lanes as two 256-bit vectors: AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/types.h"

namespace cadenza::CADENZA_ISA {

struct Vec {
  __m256 lo, hi;
};
struct VecI {
  __m256i lo, hi;
};
// Each lane is all ones or all zeros.
using Mask = VecI;

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline VecI set1_i(uint32_t a) { return {_mm256_set1_epi32(int(a)), _mm256_set1_epi32(int(a))}; }
inline VecI iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Mask first(int n) {
  VecI lanes = iota(), count = set1_i(uint32_t(n));
  return {_mm256_cmpgt_epi32(count.lo, lanes.lo), _mm256_cmpgt_epi32(count.hi, lanes.hi)};
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load_n(const float* p, int n) {
  Mask m = first(n);
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_n(float* p, Vec a, int n) {
  Mask m = first(n);
  _mm256_maskstore_ps(p, m.lo, a.lo);
  _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// a > b ? a : b, so a NaN in either operand yields b.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec round_even(Vec a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
// a * 2^n for integral n in [-160, 160], in two factors that are both normal.
inline __m256 scale2_half(__m256 a, __m256 n) {
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  __m256i bias = _mm256_set1_epi32(127);
  __m256i one = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i two = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(one)), _mm256_castsi256_ps(two));
}
inline Vec scale2(Vec a, Vec n) { return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }

inline VecI as_int(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Vec as_float(VecI a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
template <int Op>
inline Mask compare(Vec a, Vec b) {
  return as_int({_mm256_cmp_ps(a.lo, b.lo, Op), _mm256_cmp_ps(a.hi, b.hi, Op)});
}
inline Mask cmp_gt(Vec a, Vec b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask cmp_ge(Vec a, Vec b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask cmp_eq(Vec a, Vec b) { return compare<_CMP_EQ_OQ>(a, b); }

inline VecI add_i(VecI a, VecI b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline VecI sub_i(VecI a, VecI b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline VecI mul_i(VecI a, VecI b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
inline VecI and_i(VecI a, VecI b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline VecI or_i(VecI a, VecI b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline VecI xor_i(VecI a, VecI b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int N>
inline VecI shr(VecI a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
inline VecI shl(VecI a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline VecI max_u(VecI a, VecI b) {
  return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)};
}
inline Vec from_i32(VecI a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// Both 16-bit halves convert exactly; the fma rounds once.
inline Vec from_u32(VecI a) {
  Vec high = from_i32(shr<16>(a)), low = from_i32(and_i(a, set1_i(0xffff)));
  return fma(high, set1(65536.0f), low);
}
inline void store_i(uint32_t* p, VecI a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}

inline Mask mask_and(Mask a, Mask b) { return and_i(a, b); }
inline Mask mask_not(Mask a) { return xor_i(a, set1_i(0xffffffffu)); }
inline uint32_t bits(Mask a) {
  Vec f = as_float(a);
  return uint32_t(_mm256_movemask_ps(f.lo)) | uint32_t(_mm256_movemask_ps(f.hi)) << 8;
}
inline Mask from_bits(uint32_t a) {
  __m256i given = _mm256_set1_epi32(int(a));
  __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(given, low), low),
          _mm256_cmpeq_epi32(_mm256_and_si256(given, high), high)};
}
inline bool any(Mask a) {
  __m256i both = _mm256_or_si256(a.lo, a.hi);
  return !_mm256_testz_si256(both, both);
}
inline Vec select(Mask m, Vec a, Vec b) {
  Vec choose = as_float(m);
  return {_mm256_blendv_ps(b.lo, a.lo, choose.lo), _mm256_blendv_ps(b.hi, a.hi, choose.hi)};
}

inline Vec load_bf16(const bf16* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  VecI wide{_mm256_cvtepu16_epi32(_mm_loadu_si128(from)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
  return as_float(shl<16>(wide));
}
inline Vec load_bf16_n(const bf16* p, int n) {
  bf16 lanes[kLanes] = {};
  memcpy(lanes, p, sizeof(bf16) * size_t(n < kLanes ? n : kLanes));
  return load_bf16(lanes);
}
// Round to nearest even; NaN stays a quiet NaN.
inline void store_bf16(bf16* p, Vec a) {
  VecI raw = as_int(a), top = shr<16>(raw);
  VecI rounded = shr<16>(add_i(raw, add_i(and_i(top, set1_i(1)), set1_i(0x7fff))));
  Mask nan = compare<_CMP_UNORD_Q>(a, a);
  VecI out = as_int(select(nan, as_float(or_i(top, set1_i(0x40))), as_float(rounded)));
  __m256i packed = _mm256_packus_epi32(out.lo, out.hi);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_bf16_n(bf16* p, Vec a, int n) {
  bf16 lanes[kLanes];
  store_bf16(lanes, a);
  memcpy(p, lanes, sizeof(bf16) * size_t(n < kLanes ? n : kLanes));
}

// A fixed tree: adds the two halves of the lanes until one lane is left.
inline float reduce_add(Vec a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(Vec a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline uint32_t reduce_max_u(VecI a) {
  __m256i h = _mm256_max_epu32(a.lo, a.hi);
  __m128i q = _mm_max_epu32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epu32(q, _mm_shuffle_epi32(q, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(q, _mm_shuffle_epi32(q, 0xb1))));
}

// Writes the lanes of `a` set in `m` contiguously and returns their number. May write all 16 lanes.
inline int compress(float* p, Mask m, Vec a) {
  uint32_t kept = bits(m);
  if (kept == 0xffff) {
    store(p, a);
    return kLanes;
  }
  alignas(32) float lanes[kLanes];
  store(lanes, a);
  int n = 0;
  for (uint32_t left = kept; left != 0; left &= left - 1) p[n++] = lanes[__builtin_ctz(left)];
  return n;
}

inline VecI load_words(const bf16* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}

// One element of x in all lanes, and its product with a column vector.
using Operand = __m256;
inline Operand broadcast(const float* p) { return _mm256_set1_ps(*p); }
inline Vec multiply_add(Vec acc, Vec w, Operand x) {
  return {_mm256_fmadd_ps(w.lo, x, acc.lo), _mm256_fmadd_ps(w.hi, x, acc.hi)};
}

// Sixteen registers: twelve accumulators, one column vector (two registers) and one operand.
constexpr int kMaxRows = 6;
constexpr int kTileVecs = 1;
constexpr int kAttendRows = 6;
constexpr int kAttendVecs = 2;
constexpr int kHeldVecs = 1;

}  // namespace cadenza::CADENZA_ISA
