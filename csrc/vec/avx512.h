// Sixteen f32 lanes as one 512-bit vector: AVX-512; bf16 pairs use vdpbf16ps if the ISA has it.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/types.h"

namespace cadenza::CADENZA_ISA {

using Vec = __m512;
using VecI = __m512i;
using Mask = __mmask16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Mask first(int n) { return n >= 16 ? Mask(0xffff) : Mask((1u << n) - 1); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline void store_n(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// a > b ? a : b, so a NaN in either operand yields b.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round_even(Vec a) { return _mm512_roundscale_ps(a, 0); }
// a * 2^n for integral n in [-160, 160].
inline Vec scale2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }

inline Mask cmp_gt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask cmp_ge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask cmp_eq(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask mask_and(Mask a, Mask b) { return a & b; }
inline Mask mask_not(Mask a) { return ~a; }
inline bool any(Mask a) { return a != 0; }
inline uint32_t bits(Mask a) { return a; }
inline Mask from_bits(uint32_t a) { return Mask(a); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }

inline VecI as_int(Vec a) { return _mm512_castps_si512(a); }
inline Vec as_float(VecI a) { return _mm512_castsi512_ps(a); }
inline VecI set1_i(uint32_t a) { return _mm512_set1_epi32(int(a)); }
inline VecI iota() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline VecI add_i(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
inline VecI sub_i(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
inline VecI mul_i(VecI a, VecI b) { return _mm512_mullo_epi32(a, b); }
inline VecI and_i(VecI a, VecI b) { return _mm512_and_si512(a, b); }
inline VecI or_i(VecI a, VecI b) { return _mm512_or_si512(a, b); }
inline VecI xor_i(VecI a, VecI b) { return _mm512_xor_si512(a, b); }
template <int N>
inline VecI shr(VecI a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
inline VecI shl(VecI a) {
  return _mm512_slli_epi32(a, N);
}
inline VecI max_u(VecI a, VecI b) { return _mm512_max_epu32(a, b); }
inline Vec from_i32(VecI a) { return _mm512_cvtepi32_ps(a); }
inline Vec from_u32(VecI a) { return _mm512_cvtepu32_ps(a); }
inline void store_i(uint32_t* p, VecI a) { _mm512_storeu_si512(p, a); }

inline Vec load_bf16(const bf16* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_float(shl<16>(_mm512_cvtepu16_epi32(raw)));
}
inline Vec load_bf16_n(const bf16* p, int n) {
  return as_float(shl<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p))));
}
// Round to nearest even; NaN stays a quiet NaN.
inline __m256i to_bf16(Vec a) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(a);
#else
  VecI raw = as_int(a);
  VecI odd = and_i(shr<16>(raw), set1_i(1));
  VecI rounded = shr<16>(add_i(raw, add_i(odd, set1_i(0x7fff))));
  VecI quiet = or_i(shr<16>(raw), set1_i(0x40));
  Mask nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
#endif
}
inline void store_bf16(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a));
}
inline void store_bf16_n(bf16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first(n), to_bf16(a));
}

// A fixed tree: adds the two halves of the lanes until one lane is left.
inline float reduce_add(Vec a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
inline uint32_t reduce_max_u(VecI a) { return _mm512_reduce_max_epu32(a); }

// Writes the lanes of `a` set in `m` contiguously and returns their number. May write all 16 lanes.
inline int compress(float* p, Mask m, Vec a) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, a));
  return __builtin_popcount(m);
}

inline VecI load_words(const bf16* p) { return _mm512_loadu_si512(p); }

// One element of x in all lanes, and its product with a column vector.
using Operand = Vec;
inline Operand broadcast(const float* p) { return set1(*p); }
inline Vec multiply_add(Vec acc, Vec w, Operand x) { return fma(w, x, acc); }

constexpr int kAttendRows = 6;
constexpr int kAttendVecs = 4;
constexpr int kTileVecs = 2;
constexpr int kHeldVecs = 4;

#ifdef __AVX512BF16__
#define CADENZA_VEC_BF16_DOT
constexpr int kMaxRows = 14;
using PairVec = __m512bh;
using PairOperand = __m512bh;
inline PairVec as_pairs(VecI words) { return (__m512bh)words; }
inline PairOperand broadcast_pair(uint32_t pair) { return (__m512bh)set1_i(pair); }
inline Vec dot(Vec acc, PairVec w, PairOperand x) { return _mm512_dpbf16_ps(acc, w, x); }
#else
constexpr int kMaxRows = 12;
#endif

}  // namespace cadenza::CADENZA_ISA
