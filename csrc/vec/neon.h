// Sixteen f32 lanes as four 128-bit vectors: NEON; bf16 pairs use BFDOT if the ISA has it.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "core/types.h"

namespace cadenza::CADENZA_ISA {

constexpr int kParts = 4;

struct Vec {
  float32x4_t q[kParts];
};
struct VecI {
  uint32x4_t q[kParts];
};
// Each lane is all ones or all zeros.
using Mask = VecI;

template <class F>
inline Vec map_parts(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
inline VecI map_parts_i(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec set1(float x) {
  float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
inline Vec zero() { return set1(0.0f); }
inline VecI set1_i(uint32_t a) {
  uint32x4_t v = vdupq_n_u32(a);
  return {{v, v, v, v}};
}
inline VecI iota() {
  const uint32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return map_parts_i([&](int i) { return vld1q_u32(lanes + 4 * i); });
}
inline Mask first(int n) {
  VecI lanes = iota(), count = set1_i(uint32_t(n < 0 ? 0 : n));
  return map_parts_i([&](int i) { return vcltq_u32(lanes.q[i], count.q[i]); });
}
inline Vec load(const float* p) {
  return map_parts([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline Vec load_n(const float* p, int n) {
  float lanes[kLanes] = {};
  memcpy(lanes, p, sizeof(float) * size_t(n < kLanes ? n : kLanes));
  return load(lanes);
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < kParts; i++) vst1q_f32(p + 4 * i, a.q[i]);
}
inline void store_n(float* p, Vec a, int n) {
  float lanes[kLanes];
  store(lanes, a);
  memcpy(p, lanes, sizeof(float) * size_t(n < kLanes ? n : kLanes));
}

inline Vec add(Vec a, Vec b) {
  return map_parts([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
}
inline Vec sub(Vec a, Vec b) {
  return map_parts([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
}
inline Vec mul(Vec a, Vec b) {
  return map_parts([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
}
inline Vec div(Vec a, Vec b) {
  return map_parts([&](int i) { return vdivq_f32(a.q[i], b.q[i]); });
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return map_parts([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return map_parts([&](int i) { return vfmsq_f32(c.q[i], a.q[i], b.q[i]); });
}
// a > b ? a : b, so a NaN in either operand yields b.
inline Vec max(Vec a, Vec b) {
  return map_parts([&](int i) { return vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
inline Vec min(Vec a, Vec b) {
  return map_parts([&](int i) { return vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
inline Vec round_even(Vec a) {
  return map_parts([&](int i) { return vrndnq_f32(a.q[i]); });
}
// a * 2^n for integral n in [-160, 160], in two factors that are both normal.
inline float32x4_t scale2_part(float32x4_t a, float32x4_t n) {
  int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
  int32x4_t one = vshlq_n_s32(vaddq_s32(half, bias), 23);
  int32x4_t two = vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23);
  return vmulq_f32(vmulq_f32(a, vreinterpretq_f32_s32(one)), vreinterpretq_f32_s32(two));
}
inline Vec scale2(Vec a, Vec n) {
  return map_parts([&](int i) { return scale2_part(a.q[i], n.q[i]); });
}

inline VecI as_int(Vec a) {
  return map_parts_i([&](int i) { return vreinterpretq_u32_f32(a.q[i]); });
}
inline Vec as_float(VecI a) {
  return map_parts([&](int i) { return vreinterpretq_f32_u32(a.q[i]); });
}
inline Mask cmp_gt(Vec a, Vec b) {
  return map_parts_i([&](int i) { return vcgtq_f32(a.q[i], b.q[i]); });
}
inline Mask cmp_ge(Vec a, Vec b) {
  return map_parts_i([&](int i) { return vcgeq_f32(a.q[i], b.q[i]); });
}
inline Mask cmp_eq(Vec a, Vec b) {
  return map_parts_i([&](int i) { return vceqq_f32(a.q[i], b.q[i]); });
}

inline VecI add_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vaddq_u32(a.q[i], b.q[i]); });
}
inline VecI sub_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vsubq_u32(a.q[i], b.q[i]); });
}
inline VecI mul_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vmulq_u32(a.q[i], b.q[i]); });
}
inline VecI and_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vandq_u32(a.q[i], b.q[i]); });
}
inline VecI or_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vorrq_u32(a.q[i], b.q[i]); });
}
inline VecI xor_i(VecI a, VecI b) {
  return map_parts_i([&](int i) { return veorq_u32(a.q[i], b.q[i]); });
}
template <int N>
inline VecI shr(VecI a) {
  return map_parts_i([&](int i) { return vshrq_n_u32(a.q[i], N); });
}
template <int N>
inline VecI shl(VecI a) {
  return map_parts_i([&](int i) { return vshlq_n_u32(a.q[i], N); });
}
inline VecI max_u(VecI a, VecI b) {
  return map_parts_i([&](int i) { return vmaxq_u32(a.q[i], b.q[i]); });
}
inline Vec from_i32(VecI a) {
  return map_parts([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a.q[i])); });
}
inline Vec from_u32(VecI a) {
  return map_parts([&](int i) { return vcvtq_f32_u32(a.q[i]); });
}
inline void store_i(uint32_t* p, VecI a) {
  for (int i = 0; i < kParts; i++) vst1q_u32(p + 4 * i, a.q[i]);
}

inline Mask mask_and(Mask a, Mask b) { return and_i(a, b); }
inline Mask mask_not(Mask a) {
  return map_parts_i([&](int i) { return vmvnq_u32(a.q[i]); });
}
inline uint32_t bits(Mask a) {
  const uint32_t weights[4] = {1, 2, 4, 8};
  uint32x4_t weight = vld1q_u32(weights);
  uint32_t r = 0;
  for (int i = 0; i < kParts; i++) r |= vaddvq_u32(vandq_u32(a.q[i], weight)) << (4 * i);
  return r;
}
inline Mask from_bits(uint32_t a) {
  const uint32_t weights[4] = {1, 2, 4, 8};
  uint32x4_t weight = vld1q_u32(weights);
  return map_parts_i([&](int i) { return vtstq_u32(vdupq_n_u32(a >> (4 * i)), weight); });
}
inline bool any(Mask a) {
  return vmaxvq_u32(vorrq_u32(vorrq_u32(a.q[0], a.q[1]), vorrq_u32(a.q[2], a.q[3]))) != 0;
}
inline Vec select(Mask m, Vec a, Vec b) {
  return map_parts([&](int i) { return vbslq_f32(m.q[i], a.q[i], b.q[i]); });
}

inline Vec load_bf16(const bf16* p) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p);
  return as_float(map_parts_i([=](int i) { return vshll_n_u16(vld1_u16(from + 4 * i), 16); }));
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
  Mask number = cmp_eq(a, a);
  VecI out = as_int(select(number, as_float(rounded), as_float(or_i(top, set1_i(0x40)))));
  for (int i = 0; i < kParts; i++) {
    vst1_u16(reinterpret_cast<uint16_t*>(p) + 4 * i, vmovn_u32(out.q[i]));
  }
}
inline void store_bf16_n(bf16* p, Vec a, int n) {
  bf16 lanes[kLanes];
  store_bf16(lanes, a);
  memcpy(p, lanes, sizeof(bf16) * size_t(n < kLanes ? n : kLanes));
}

// A fixed tree: adds the two halves of the lanes until one lane is left.
inline float reduce_add(Vec a) {
  float32x4_t q = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float reduce_max(Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
}
inline uint32_t reduce_max_u(VecI a) {
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(a.q[0], a.q[1]), vmaxq_u32(a.q[2], a.q[3])));
}

// Writes the lanes of `a` set in `m` contiguously and returns their number. May write all 16 lanes.
inline int compress(float* p, Mask m, Vec a) {
  uint32_t kept = bits(m);
  if (kept == 0xffff) {
    store(p, a);
    return kLanes;
  }
  float lanes[kLanes];
  store(lanes, a);
  int n = 0;
  for (uint32_t left = kept; left != 0; left &= left - 1) p[n++] = lanes[__builtin_ctz(left)];
  return n;
}

inline VecI load_words(const bf16* p) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(p);
  return map_parts_i([=](int i) { return vld1q_u32(from + 4 * i); });
}

// One element of x for all lanes, and its product with a column vector.
using Operand = float;
inline Operand broadcast(const float* p) { return *p; }
inline Vec multiply_add(Vec acc, Vec w, Operand x) {
  return map_parts([&](int i) { return vfmaq_n_f32(acc.q[i], w.q[i], x); });
}

constexpr int kMaxRows = 6;
constexpr int kTileVecs = 1;
constexpr int kAttendRows = 6;
constexpr int kAttendVecs = 1;
constexpr int kHeldVecs = 1;

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define CADENZA_VEC_BF16_DOT
struct PairVec {
  bfloat16x8_t q[kParts];
};
using PairOperand = bfloat16x8_t;
inline PairVec as_pairs(VecI words) {
  PairVec pairs;
  for (int i = 0; i < kParts; i++) pairs.q[i] = vreinterpretq_bf16_u32(words.q[i]);
  return pairs;
}
inline PairOperand broadcast_pair(uint32_t pair) {
  return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
}
inline Vec dot(Vec acc, PairVec w, PairOperand x) {
  return map_parts([&](int i) { return vbfdotq_f32(acc.q[i], w.q[i], x); });
}
#endif

}  // namespace cadenza::CADENZA_ISA
