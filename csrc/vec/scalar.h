// Sixteen f32 lanes as portable loops, which the compiler may vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace cadenza::CADENZA_ISA {

struct Vec {
  float v[kLanes];
};
struct VecI {
  uint32_t v[kLanes];
};
using Mask = uint16_t;

template <class F>
inline Vec map_lanes(F f) {
  Vec r;
  for (int i = 0; i < kLanes; i++) r.v[i] = f(i);
  return r;
}
template <class F>
inline VecI map_lanes_i(F f) {
  VecI r;
  for (int i = 0; i < kLanes; i++) r.v[i] = f(i);
  return r;
}
template <class F>
inline Mask map_mask(F f) {
  uint32_t r = 0;
  for (int i = 0; i < kLanes; i++) r |= uint32_t(f(i)) << i;
  return Mask(r);
}

inline Vec set1(float x) {
  return map_lanes([=](int) { return x; });
}
inline Vec zero() { return set1(0.0f); }
inline Mask first(int n) { return n >= kLanes ? Mask(0xffff) : Mask((1u << n) - 1); }
inline Vec load(const float* p) {
  return map_lanes([=](int i) { return p[i]; });
}
inline Vec load_n(const float* p, int n) {
  return map_lanes([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, Vec a) { memcpy(p, a.v, sizeof(a.v)); }
inline void store_n(float* p, Vec a, int n) {
  for (int i = 0; i < kLanes && i < n; i++) p[i] = a.v[i];
}

inline Vec add(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec div(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] / b.v[i]; });
}
// a * b + c, rounded once.
#ifdef __FP_FAST_FMAF
inline float fma_lane(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// Without FMA hardware, in double: the product is exact, and the sum is rounded to odd, so that
// rounding it to float rounds the exact value. Boldo and Melquiond, 2008.
inline float fma_lane(float a, float b, float c) {
  const double product = double(a) * double(b), addend = double(c);
  double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  uint64_t raw;
  memcpy(&raw, &sum, sizeof(raw));
  const bool is_inexact = error > 0.0 || error < 0.0;  // NaN beside an infinity: exact
  const uint64_t is_even = is_inexact ? ~raw & 1 : 0;
  raw += (error > 0.0) == (sum > 0.0) ? is_even : 0 - is_even;
  memcpy(&sum, &raw, sizeof(raw));
  return float(sum);
}
#endif
inline Vec fma(Vec a, Vec b, Vec c) {
  return map_lanes([&](int i) { return fma_lane(a.v[i], b.v[i], c.v[i]); });
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return map_lanes([&](int i) { return fma_lane(-a.v[i], b.v[i], c.v[i]); });
}
// a > b ? a : b, so a NaN in either operand yields b.
inline Vec max(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
inline Vec round_even(Vec a) {
  return map_lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}

inline VecI as_int(Vec a) {
  VecI r;
  memcpy(r.v, a.v, sizeof(r.v));
  return r;
}
inline Vec as_float(VecI a) {
  Vec r;
  memcpy(r.v, a.v, sizeof(r.v));
  return r;
}
// a * 2^n for integral n in [-160, 160], in two factors that are both normal.
inline Vec scale2(Vec a, Vec n) {
  return map_lanes([&](int i) {
    int whole = n.v[i] == n.v[i] ? int(n.v[i]) : 0, half = whole >> 1;
    uint32_t raw[2] = {uint32_t(half + 127) << 23, uint32_t(whole - half + 127) << 23};
    float factor[2];
    memcpy(factor, raw, sizeof(raw));
    return a.v[i] * factor[0] * factor[1];
  });
}

inline Mask cmp_gt(Vec a, Vec b) {
  return map_mask([&](int i) { return a.v[i] > b.v[i]; });
}
inline Mask cmp_ge(Vec a, Vec b) {
  return map_mask([&](int i) { return a.v[i] >= b.v[i]; });
}
inline Mask cmp_eq(Vec a, Vec b) {
  return map_mask([&](int i) { return a.v[i] == b.v[i]; });
}
inline Mask mask_and(Mask a, Mask b) { return a & b; }
inline Mask mask_not(Mask a) { return Mask(~a); }
inline bool any(Mask a) { return a != 0; }
inline uint32_t bits(Mask a) { return a; }
inline Mask from_bits(uint32_t a) { return Mask(a); }
inline Vec select(Mask m, Vec a, Vec b) {
  return map_lanes([&](int i) { return (m >> i & 1) ? a.v[i] : b.v[i]; });
}

inline VecI set1_i(uint32_t a) {
  return map_lanes_i([=](int) { return a; });
}
inline VecI iota() {
  return map_lanes_i([](int i) { return uint32_t(i); });
}
inline VecI add_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] + b.v[i]; });
}
inline VecI sub_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] - b.v[i]; });
}
inline VecI mul_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] * b.v[i]; });
}
inline VecI and_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] & b.v[i]; });
}
inline VecI or_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] | b.v[i]; });
}
inline VecI xor_i(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int N>
inline VecI shr(VecI a) {
  return map_lanes_i([&](int i) { return a.v[i] >> N; });
}
template <int N>
inline VecI shl(VecI a) {
  return map_lanes_i([&](int i) { return a.v[i] << N; });
}
inline VecI max_u(VecI a, VecI b) {
  return map_lanes_i([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec from_i32(VecI a) {
  return map_lanes([&](int i) { return float(int32_t(a.v[i])); });
}
inline Vec from_u32(VecI a) {
  return map_lanes([&](int i) { return float(a.v[i]); });
}
inline void store_i(uint32_t* p, VecI a) { memcpy(p, a.v, sizeof(a.v)); }

inline Vec load_bf16(const bf16* p) {
  return as_float(map_lanes_i([=](int i) { return uint32_t(p[i].bits) << 16; }));
}
inline Vec load_bf16_n(const bf16* p, int n) {
  return as_float(map_lanes_i([=](int i) { return i < n ? uint32_t(p[i].bits) << 16 : 0u; }));
}
// Round to nearest even; NaN stays a quiet NaN.
inline uint16_t round_bf16(uint32_t raw) {
  if ((raw & 0x7fffffffu) > 0x7f800000u) return uint16_t(raw >> 16 | 0x40);
  return uint16_t((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
}
inline void store_bf16_n(bf16* p, Vec a, int n) {
  VecI raw = as_int(a);
  for (int i = 0; i < kLanes && i < n; i++) p[i].bits = round_bf16(raw.v[i]);
}
inline void store_bf16(bf16* p, Vec a) { store_bf16_n(p, a, kLanes); }

// A fixed tree: adds the two halves of the lanes until one lane is left.
inline float reduce_add(Vec a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}
inline float reduce_max(Vec a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}
inline uint32_t reduce_max_u(VecI a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}

// Writes the lanes of `a` set in `m` contiguously and returns their number. May write all 16 lanes.
inline int compress(float* p, Mask m, Vec a) {
  int n = 0;
  for (int i = 0; i < kLanes; i++) {
    if (m >> i & 1) p[n++] = a.v[i];
  }
  return n;
}

inline VecI load_words(const bf16* p) {
  VecI words;
  memcpy(words.v, p, sizeof(words.v));
  return words;
}

// One element of x for all lanes, and its product with a column vector.
using Operand = float;
inline Operand broadcast(const float* p) { return *p; }
inline Vec multiply_add(Vec acc, const Vec& w, Operand x) {
  return map_lanes([&](int i) { return fma_lane(w.v[i], x, acc.v[i]); });
}

constexpr int kMaxRows = 4;
constexpr int kTileVecs = 1;
constexpr int kAttendRows = 4;
constexpr int kAttendVecs = 1;
constexpr int kHeldVecs = 1;

}  // namespace cadenza::CADENZA_ISA
