// Dot products of integer codes: sixteen columns of four unsigned weight codes with four signed
// activation codes, added to sixteen int32 sums; or of four signed codes with four weights in
// [0, 254], less kWeightBias. Exact on every ISA: no step saturates.
#pragma once

#include "core/half.h"
#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

inline uint32_t four_codes(const int8_t* p) {
  uint32_t codes;
  __builtin_memcpy(&codes, p, sizeof(codes));
  return codes;
}

#if defined(CADENZA_VEC_AVX512)

using CodeVec = __m512i;
using CodeOperand = __m512i;
constexpr int kCodeBias = 0;    // what load_codes subtracts from every code
constexpr int kWeightBias = 0;  // what store_weights subtracts from every weight
// Bytes of codes as words, and the other way round.
inline VecI load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline CodeVec codes_of(VecI words) { return words; }
inline CodeVec load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void load_nibbles(const uint8_t* p, CodeVec& low, CodeVec& high) {
  const __m512i mask = _mm512_set1_epi8(15), bytes = _mm512_loadu_si512(p);
  low = _mm512_and_si512(bytes, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
}
inline CodeOperand broadcast_codes(const int8_t* p) { return set1_i(four_codes(p)); }
inline VecI dot_codes(VecI sums, CodeVec w, CodeOperand x) {
  return _mm512_dpbusd_epi32(sums, w, x);
}
using SignedCodeVec = __m512i;
inline SignedCodeVec load_signed_codes(const int8_t* p) { return _mm512_loadu_si512(p); }
inline VecI dot_signed_codes(VecI sums, SignedCodeVec w, CodeOperand x) {
  return _mm512_dpbusd_epi32(sums, x, w);
}
inline Vec load_u8(const uint8_t* p) {
  return from_i32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_codes(int8_t* p, Vec integers) {
  __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integers));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}
// Rows of a register tile, and its column vectors.
constexpr int kDotRows = 6;
constexpr int kDotVecs = 2;

#elif defined(CADENZA_VEC_AVX2)

#ifdef __AVXVNNI__
using CodeVec = VecI;
using CodeOperand = __m256i;
inline VecI load_words(const uint8_t* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline CodeVec codes_of(VecI words) { return words; }
inline CodeVec load_codes(const uint8_t* p) { return load_words(p); }
inline void load_nibbles(const uint8_t* p, CodeVec& low, CodeVec& high) {
  const VecI mask = set1_i(0x0f0f0f0f), bytes = load_codes(p);
  low = and_i(bytes, mask);
  high = and_i(shr<4>(bytes), mask);
}
inline CodeOperand broadcast_codes(const int8_t* p) {
  return _mm256_set1_epi32(int(four_codes(p)));
}
inline VecI dot_codes(VecI sums, const CodeVec& w, CodeOperand x) {
  return {_mm256_dpbusd_avx_epi32(sums.lo, w.lo, x), _mm256_dpbusd_avx_epi32(sums.hi, w.hi, x)};
}
using SignedCodeVec = VecI;
inline SignedCodeVec load_signed_codes(const int8_t* p) {
  return load_codes(reinterpret_cast<const uint8_t*>(p));
}
inline VecI dot_signed_codes(VecI sums, const SignedCodeVec& w, CodeOperand x) {
  return {_mm256_dpbusd_avx_epi32(sums.lo, x, w.lo), _mm256_dpbusd_avx_epi32(sums.hi, x, w.hi)};
}
constexpr int kDotRows = 3;
constexpr int kCodeBias = 0;
constexpr int kWeightBias = 0;
#else
// vpmaddubsw adds products of unsigned with signed bytes in pairs of 16 bits, and saturates. It does
// not here: 8 bits are multiplied as the magnitude of a code without bias, at most 128, with the
// activation code or the weight less its bias, of at most 127, that has the code's sign.
struct CodeVec {
  VecI magnitudes, signs;
};
using CodeOperand = __m256i;
inline VecI load_words(const uint8_t* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline CodeVec load_codes(const uint8_t* p) {
  const VecI codes = xor_i(load_words(p), set1_i(0x80808080));
  return {{_mm256_abs_epi8(codes.lo), _mm256_abs_epi8(codes.hi)}, codes};
}
inline CodeOperand broadcast_codes(const int8_t* p) {
  return _mm256_set1_epi32(int(four_codes(p)));
}
inline __m256i add_pairs(__m256i sums, __m256i pairs) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline __m256i dot_half(__m256i sums, __m256i magnitudes, __m256i signs, __m256i x) {
  return add_pairs(sums, _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, signs)));
}
// The compiler takes these additions in the order of the calls. g++ 12 would otherwise reassociate a
// sum of integers, multiply everything first and spill most of the products.
inline VecI in_order(__m256i low, __m256i high) {
  asm("" : "+x"(low), "+x"(high));
  return {low, high};
}
inline VecI dot_codes(VecI sums, const CodeVec& w, CodeOperand x) {
  return in_order(dot_half(sums.lo, w.magnitudes.lo, w.signs.lo, x),
                  dot_half(sums.hi, w.magnitudes.hi, w.signs.hi, x));
}
using SignedCodeVec = CodeVec;
inline SignedCodeVec load_signed_codes(const int8_t* p) {
  const VecI codes = load_words(reinterpret_cast<const uint8_t*>(p));
  return {{_mm256_abs_epi8(codes.lo), _mm256_abs_epi8(codes.hi)}, codes};
}
inline VecI dot_signed_codes(VecI sums, const SignedCodeVec& w, CodeOperand x) {
  return dot_codes(sums, w, x);
}
inline VecI codes_of(VecI words) { return words; }  // narrow ones
inline void load_nibbles(const uint8_t* p, VecI& low, VecI& high) {
  const VecI mask = set1_i(0x0f0f0f0f), bytes = load_words(p);
  low = and_i(bytes, mask);
  high = and_i(shr<4>(bytes), mask);
}
constexpr int kDotRows = 4;
constexpr int kCodeBias = 128;
constexpr int kWeightBias = 127;
// Dots of eight columns of four codes without sign with codes of 16 bits; low and high are four
// columns, and a dot is the sum of a pair.
struct WideCodes {
  __m256i low, high;
};
struct WideDots {
  __m256i low, high;
};
inline WideCodes load_wide(const uint8_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(from)),
          _mm256_cvtepu8_epi16(_mm_loadu_si128(from + 1))};
}
inline void add_wide(WideDots& dots, const WideCodes& w, const int16_t* x) {
  int64_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  const __m256i codes = _mm256_set1_epi64x(four);
  dots.low = _mm256_add_epi32(dots.low, _mm256_madd_epi16(w.low, codes));
  dots.high = _mm256_add_epi32(dots.high, _mm256_madd_epi16(w.high, codes));
}
inline __m256i columns_of(const WideDots& dots) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(dots.low, dots.high), 0xd8);
}
inline void store_wide(int16_t* p, Vec integers) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(integers.lo),
                                           _mm256_cvtps_epi32(integers.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
#endif
constexpr int kDotVecs = 1;
inline Vec load_u8(const uint8_t* p) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return from_i32({_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline Vec load_f16(const uint16_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
inline void store_codes(int8_t* p, Vec integers) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(integers.lo),
                                     _mm256_cvtps_epi32(integers.hi));
  words = _mm256_and_si256(words, _mm256_set1_epi16(255));  // the lower bytes, with or without sign
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i codes =
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}

#elif defined(CADENZA_VEC_NEON)

struct CodeVec {
  int8x16_t q[kParts];
};
using CodeOperand = int8x16_t;
constexpr int kCodeBias = 128;
constexpr int kWeightBias = 127;
inline VecI load_words(const uint8_t* p) {
  return map_parts_i([=](int i) { return vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)); });
}
inline CodeVec codes_of(VecI words) {
  CodeVec codes;
  for (int i = 0; i < kParts; i++) codes.q[i] = vreinterpretq_s8_u32(words.q[i]);
  return codes;
}
inline CodeVec load_codes(const uint8_t* p) {
  CodeVec codes;
  for (int i = 0; i < kParts; i++) {
    codes.q[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(0x80)));
  }
  return codes;
}
inline void load_nibbles(const uint8_t* p, CodeVec& low, CodeVec& high) {
  for (int i = 0; i < kParts; i++) {
    uint8x16_t bytes = vld1q_u8(p + 16 * i);
    low.q[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    high.q[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
  }
}
inline CodeOperand broadcast_codes(const int8_t* p) {
  return vreinterpretq_s8_u32(vdupq_n_u32(four_codes(p)));
}
inline int32x4_t dot_part(int32x4_t sums, int8x16_t w, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sums, w, x);
#else
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  int32x4_t high = vpaddlq_s16(vmull_high_s8(w, x));
  return vaddq_s32(sums, vpaddq_s32(low, high));
#endif
}
inline VecI dot_codes(VecI sums, const CodeVec& w, CodeOperand x) {
  return map_parts_i([&](int i) {
    return vreinterpretq_u32_s32(dot_part(vreinterpretq_s32_u32(sums.q[i]), w.q[i], x));
  });
}
using SignedCodeVec = CodeVec;
inline SignedCodeVec load_signed_codes(const int8_t* p) {
  CodeVec codes;
  for (int i = 0; i < kParts; i++) codes.q[i] = vld1q_s8(p + 16 * i);
  return codes;
}
inline VecI dot_signed_codes(VecI sums, const SignedCodeVec& w, CodeOperand x) {
  return dot_codes(sums, w, x);
}
inline Vec load_u8(const uint8_t* p) {
  return map_parts([=](int i) {
    const uint32_t lanes[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    return vcvtq_f32_u32(vld1q_u32(lanes));
  });
}
inline Vec load_f16(const uint16_t* p) {
  return map_parts([=](int i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  });
}
inline void store_codes(int8_t* p, Vec integers) {
  int8_t codes[kLanes];
  for (int i = 0; i < kParts; i++) {
    int32_t lanes[4];
    vst1q_s32(lanes, vcvtq_s32_f32(integers.q[i]));
    for (int j = 0; j < 4; j++) codes[4 * i + j] = int8_t(lanes[j]);
  }
  memcpy(p, codes, sizeof(codes));
}
constexpr int kDotRows = 3;
constexpr int kDotVecs = 1;

#else

struct CodeVec {
  uint8_t codes[4 * kLanes];
};
struct CodeOperand {
  int8_t codes[4];
};
constexpr int kCodeBias = 0;
constexpr int kWeightBias = 127;
inline VecI load_words(const uint8_t* p) {
  VecI words;
  memcpy(words.v, p, sizeof(words.v));
  return words;
}
inline CodeVec codes_of(const VecI& words) {
  CodeVec w;
  memcpy(w.codes, words.v, sizeof(w.codes));
  return w;
}
inline CodeVec load_codes(const uint8_t* p) { return codes_of(load_words(p)); }
inline void load_nibbles(const uint8_t* p, CodeVec& low, CodeVec& high) {
  for (int i = 0; i < 4 * kLanes; i++) {
    low.codes[i] = p[i] & 15;
    high.codes[i] = p[i] >> 4;
  }
}
inline CodeOperand broadcast_codes(const int8_t* p) {
  CodeOperand x;
  memcpy(x.codes, p, sizeof(x.codes));
  return x;
}
// Of codes with or without sign.
template <class Code>
inline VecI dot_bytes(VecI sums, const Code (&w)[4 * kLanes], const CodeOperand& x) {
  return map_lanes_i([&](int i) {
    uint32_t sum = sums.v[i];
    for (int j = 0; j < 4; j++) sum += uint32_t(int32_t(w[4 * i + j]) * x.codes[j]);
    return sum;
  });
}
inline VecI dot_codes(VecI sums, const CodeVec& w, const CodeOperand& x) {
  return dot_bytes(sums, w.codes, x);
}
struct SignedCodeVec {
  int8_t codes[4 * kLanes];
};
inline SignedCodeVec load_signed_codes(const int8_t* p) {
  SignedCodeVec w;
  memcpy(w.codes, p, sizeof(w.codes));
  return w;
}
inline VecI dot_signed_codes(VecI sums, const SignedCodeVec& w, const CodeOperand& x) {
  return dot_bytes(sums, w.codes, x);
}
inline Vec load_u8(const uint8_t* p) {
  return map_lanes([=](int i) { return float(p[i]); });
}
inline Vec load_f16(const uint16_t* p) {
  return map_lanes([=](int i) { return f16_to_f32(p[i]); });
}
inline void store_codes(int8_t* p, Vec integers) {
  for (int i = 0; i < kLanes; i++) p[i] = int8_t(int(integers.v[i]));
}
constexpr int kDotRows = 2;
constexpr int kDotVecs = 1;

#endif

// Stores weights from 0 to 254, less their bias; as bytes without sign if there is none.
inline void store_weights(int8_t* p, Vec integers) {
  store_codes(p, sub(integers, set1(float(kWeightBias))));
}

// The dots of one row with a column vector of codes of 4 to 6 bits.
#if defined(CADENZA_VEC_AVX2) && !defined(__AVXVNNI__)
// Added up in 16 bits: a pair is at most 2 * 15 * 127, so that eight fit, or 2 * 31 * 127, so that
// four do, or 2 * 63 * 127, so that two do.
struct NarrowDots {
  using Codes = VecI;
  static constexpr int max_steps(int bits) { return bits == 4 ? 8 : (bits == 5 ? 4 : 2); }
  static NarrowDots begin(VecI) { return {set1_i(0)}; }
  void add(const Codes& w, CodeOperand x) {
    pairs = in_order(_mm256_add_epi16(pairs.lo, _mm256_maddubs_epi16(w.lo, x)),
                     _mm256_add_epi16(pairs.hi, _mm256_maddubs_epi16(w.hi, x)));
  }
  VecI end(VecI sums) const {
    return {add_pairs(sums.lo, pairs.lo), add_pairs(sums.hi, pairs.hi)};
  }

  VecI pairs;
};
#else
struct NarrowDots {
  using Codes = CodeVec;
  static constexpr int max_steps(int) { return 8; }
  static NarrowDots begin(VecI sums) { return {sums}; }
  void add(const Codes& w, const CodeOperand& x) { sums = dot_codes(sums, w, x); }
  VecI end(VecI) const { return sums; }

  VecI sums;
};
#endif

// Loads codes of 5 or 6 bits from 64 bytes of their low four; their highest bits are the lowest of
// each byte of `highest`, and are shifted out.
template <int Bits>
inline void load_wider(const uint8_t* p, VecI& highest, NarrowDots::Codes& low,
                       NarrowDots::Codes& high) {
  constexpr int kAbove = Bits - 4;
  const VecI nibbles = load_words(p), mask = set1_i(0x0f0f0f0f);
  const VecI above = set1_i(kAbove == 1 ? 0x10101010 : 0x30303030);
  low = codes_of(or_i(and_i(nibbles, mask), and_i(shl<4>(highest), above)));
  high = codes_of(or_i(and_i(shr<4>(nibbles), mask), and_i(shl<4 - kAbove>(highest), above)));
  highest = shr<2 * kAbove>(highest);
}

// kDoubledE2m1 (core/code_format.h) plus kE2m1Bias.
constexpr uint8_t kBiasedE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// What codes of MXFP4 stand for, without sign.
inline NarrowDots::Codes biased_e2m1(const NarrowDots::Codes& indices) {
#if defined(CADENZA_VEC_AVX512)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kBiasedE2m1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), indices);
#elif defined(CADENZA_VEC_AVX2)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kBiasedE2m1));
  const __m256i values = _mm256_broadcastsi128_si256(half);
  return {_mm256_shuffle_epi8(values, indices.lo), _mm256_shuffle_epi8(values, indices.hi)};
#elif defined(CADENZA_VEC_NEON)
  const int8x16_t values = vreinterpretq_s8_u8(vld1q_u8(kBiasedE2m1));
  NarrowDots::Codes codes;
  for (int i = 0; i < kParts; i++) {
    codes.q[i] = vqtbl1q_s8(values, vreinterpretq_u8_s8(indices.q[i]));
  }
  return codes;
#else
  NarrowDots::Codes codes;
  for (int i = 0; i < 4 * kLanes; i++) codes.codes[i] = kBiasedE2m1[indices.codes[i]];
  return codes;
#endif
}

}  // namespace cadenza::CADENZA_ISA
