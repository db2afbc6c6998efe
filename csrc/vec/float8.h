// Decodes e4m3 codes: 32 consecutive ones, two for each of sixteen columns, become sixteen words of
// two bf16 values, as dense weights in bf16 have them.
//
// The bits of a code without its sign, shifted to bf16's exponent and fraction, are those of its value
// but for an offset: the difference of the exponents' biases, or what a table says of a subnormal code
// (below 8). NaN codes are decoded as 480 and -480.
#pragma once

#include "core/float8.h"
#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

constexpr uint16_t bf16_bits(uint8_t code) {
  const float value = float8_value(code & 0x7f);
  if (value == 0.0f) return 0;
  int exponent = 127;
  float fraction = value;
  while (fraction >= 2.0f) fraction *= 0.5f, exponent++;
  while (fraction < 1.0f) fraction *= 2.0f, exponent--;
  return uint16_t(exponent << 7 | int((fraction - 1.0f) * 128.0f));
}

constexpr uint16_t kNormalOffset = (127 - 7) << 7;
constexpr uint16_t subnormal_offset(uint8_t code) { return uint16_t(bf16_bits(code) - (code << 4)); }

#if defined(CADENZA_VEC_AVX512)

struct Float8Offsets {
  alignas(64) uint16_t of_code[32] = {};
  constexpr Float8Offsets() {
    for (uint8_t code = 0; code < 8; code++) of_code[code] = subnormal_offset(code);
  }
};
constexpr Float8Offsets kFloat8Offsets;

inline VecI load_float8(const uint8_t* p) {
  __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  __m512i bits = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(short(0x87f0)));
  __mmask32 is_subnormal = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  __m512i offsets =
      _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(short(kNormalOffset)), is_subnormal, wide,
                                    _mm512_load_si512(kFloat8Offsets.of_code));
  return _mm512_add_epi16(bits, offsets);
}
// Rows of a register tile.
constexpr int kFloat8Rows = 12;

#elif defined(CADENZA_VEC_AVX2) || defined(CADENZA_VEC_NEON)

// The two bytes of a value are found one by one, with sixteen offsets for each; index 8 is for all
// codes that are not subnormal. No addition carries.
struct Float8Offsets {
  alignas(16) uint8_t low[16] = {}, high[16] = {};
  constexpr Float8Offsets() {
    for (uint8_t code = 0; code < 8; code++) {
      low[code] = uint8_t(bf16_bits(code) - (code << 4));
      high[code] = uint8_t(bf16_bits(code) >> 8);
    }
    high[8] = kNormalOffset >> 8;
  }
};
constexpr Float8Offsets kFloat8Offsets;

#ifdef CADENZA_VEC_AVX2

inline __m256i lookup_bytes(const uint8_t* table, __m256i indices) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), indices);
}

inline VecI load_float8(const uint8_t* p) {
  // The middle quarters change places, because unpacking works within halves.
  __m256i codes = _mm256_permute4x64_epi64(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 0xd8);
  __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi8(char(0x80)));
  __m256i magnitude = _mm256_xor_si256(codes, sign);
  __m256i index = _mm256_min_epu8(magnitude, _mm256_set1_epi8(8));
  __m256i low = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(char(0xf0)));
  __m256i high = _mm256_and_si256(_mm256_srli_epi16(magnitude, 4), _mm256_set1_epi8(0x0f));
  low = _mm256_add_epi8(low, lookup_bytes(kFloat8Offsets.low, index));
  high = _mm256_add_epi8(high, lookup_bytes(kFloat8Offsets.high, index));
  high = _mm256_or_si256(high, sign);
  return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}
constexpr int kFloat8Rows = 4;

#else

inline VecI load_float8(const uint8_t* p) {
  const uint8x16_t lows = vld1q_u8(kFloat8Offsets.low), highs = vld1q_u8(kFloat8Offsets.high);
  VecI words;
  for (int i = 0; i < 2; i++) {
    uint8x16_t codes = vld1q_u8(p + 16 * i), sign = vandq_u8(codes, vdupq_n_u8(0x80));
    uint8x16_t magnitude = veorq_u8(codes, sign), index = vminq_u8(magnitude, vdupq_n_u8(8));
    uint8x16_t low = vaddq_u8(vshlq_n_u8(codes, 4), vqtbl1q_u8(lows, index));
    uint8x16_t high = vaddq_u8(vshrq_n_u8(magnitude, 4), vqtbl1q_u8(highs, index));
    high = vorrq_u8(high, sign);
    words.q[2 * i] = vreinterpretq_u32_u8(vzip1q_u8(low, high));
    words.q[2 * i + 1] = vreinterpretq_u32_u8(vzip2q_u8(low, high));
  }
  return words;
}
constexpr int kFloat8Rows = 4;

#endif

#else

struct Float8Values {
  uint16_t of_code[256] = {};
  constexpr Float8Values() {
    for (int code = 0; code < 128; code++) {
      of_code[code] = code < 8 ? bf16_bits(uint8_t(code)) : uint16_t((code << 4) + kNormalOffset);
      of_code[code + 128] = of_code[code] | 0x8000;
    }
  }
};
constexpr Float8Values kFloat8Values;

inline VecI load_float8(const uint8_t* p) {
  return map_lanes_i([=](int i) {
    return kFloat8Values.of_code[p[2 * i]] | uint32_t(kFloat8Values.of_code[p[2 * i + 1]]) << 16;
  });
}
constexpr int kFloat8Rows = 4;

#endif

}  // namespace cadenza::CADENZA_ISA
