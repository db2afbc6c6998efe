// Conversions of f16, exact to f32 and rounded to nearest even from it. Always inlined, so that no
// copy that was compiled for one ISA is shared with another.
#pragma once

#include <cstdint>
#include <cstring>

namespace cadenza {

[[gnu::always_inline]] inline float f16_to_f32(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31;
  uint32_t fraction = half & 1023, raw;
  if (exponent == 31) {
    raw = sign | 0x7f800000u | fraction << 13;
  } else if (exponent != 0) {
    raw = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float magnitude = float(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  float value;
  std::memcpy(&value, &raw, sizeof(value));
  return value;
}

// Of a value that is not negative; values above 65504 round to infinity, NaN stays NaN.
[[gnu::always_inline]] inline uint16_t f32_to_f16(float value) {
  if (value != value) return 0x7e00;
  if (value >= 65520.0f) return 0x7c00;
  if (value < 0x1p-14f) {  // subnormal: a multiple of 2^-24; adding 2^23 rounds to nearest even
    return uint16_t((value * 0x1p24f + 0x1p23f) - 0x1p23f);
  }
  uint32_t raw;
  std::memcpy(&raw, &value, sizeof(raw));
  return uint16_t((raw - (112u << 23) + 0xfff + (raw >> 13 & 1)) >> 13);
}

}  // namespace cadenza
