// exp, log, tanh, erf and activations on sixteen lanes. NaN propagates.
#pragma once

#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

// 2^r on |r| <= 1/2 (Taylor in r·ln 2, degree 7; error below 1 ulp).
inline Vec exp2_reduced(Vec r) {
  Vec p = set1(1.5252734e-5f);
  p = fma(p, r, set1(1.5403530e-4f));
  p = fma(p, r, set1(1.3333558e-3f));
  p = fma(p, r, set1(9.6181291e-3f));
  p = fma(p, r, set1(5.5504109e-2f));
  p = fma(p, r, set1(2.4022651e-1f));
  p = fma(p, r, set1(6.9314718e-1f));
  return fma(p, r, set1(1.0f));
}

inline Vec exp2_vec(Vec x) {
  x = min(set1(129.0f), max(set1(-151.0f), x));
  Vec n = round_even(x);
  return scale2(exp2_reduced(sub(x, n)), n);
}

// Cody-Waite reduction by ln 2 in two parts; the error is about 1 ulp over the whole range.
inline Vec exp_vec(Vec x) {
  x = min(set1(89.0f), max(set1(-104.0f), x));
  Vec n = round_even(mul(x, set1(1.44269504f)));
  Vec r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9841270e-4f);
  p = fma(p, r, set1(1.3888889e-3f));
  p = fma(p, r, set1(8.3333333e-3f));
  p = fma(p, r, set1(4.1666667e-2f));
  p = fma(p, r, set1(1.6666667e-1f));
  p = fma(p, r, set1(5.0e-1f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale2(p, n);
}

// Natural logarithm of normal positive x, by atanh of (m - 1) / (m + 1) with m in [sqrt½, sqrt2).
inline Vec log_vec(Vec x) {
  VecI raw = as_int(x);
  // Adding the distance from sqrt(1/2) to 1 carries into the exponent exactly when m >= sqrt(1/2).
  VecI shifted = add_i(raw, set1_i(0x3f800000u - 0x3f3504f3u));
  VecI exponent = sub_i(shr<23>(shifted), set1_i(127));
  VecI mantissa = add_i(and_i(shifted, set1_i(0x007fffff)), set1_i(0x3f3504f3u));
  Vec n = from_i32(exponent);
  Vec f = sub(as_float(mantissa), set1(1.0f));
  Vec s = div(f, add(f, set1(2.0f)));
  Vec z = mul(s, s);
  Vec p = set1(0.2222222222f);
  p = fma(p, z, set1(0.2857142857f));
  p = fma(p, z, set1(0.4f));
  p = fma(p, z, set1(0.6666666667f));
  // log1p(f) = f - s (f - z p), written so that the leading f stays exact.
  Vec low = fnma(s, fnma(z, p, f), mul(n, set1(-2.12194440e-4f)));
  return add(add(low, f), mul(n, set1(0.693359375f)));
}

// log(1 - u) for u in (0, 1), corrected for the rounding of 1 - u.
inline Vec log1p_neg(Vec u) {
  Vec w = sub(set1(1.0f), u);
  Vec lost = sub(sub(set1(1.0f), w), u);
  return add(log_vec(w), div(lost, w));
}

// 1 - 2 / (e^2x + 1); for |x| < 1/4 an odd polynomial, because that form would cancel.
inline Vec tanh_vec(Vec x) {
  Vec e = exp_vec(add(x, x));
  Vec far = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  Vec z = mul(x, x);
  Vec p = set1(2.1869488e-2f);
  p = fma(p, z, set1(-5.3968254e-2f));
  p = fma(p, z, set1(1.3333333e-1f));
  p = fma(p, z, set1(-3.3333333e-1f));
  Vec near = fma(mul(p, z), x, x);
  return select(cmp_gt(set1(0.0625f), z), near, far);
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp_vec(sub(zero(), x)))); }

// log(1 + e^x), corrected for the rounding of 1 + e^x; x where e^-x is lost in it.
inline Vec softplus(Vec x) {
  Vec e = exp_vec(x);
  Vec w = add(set1(1.0f), e);
  Vec lost = sub(e, sub(w, set1(1.0f)));
  Vec y = add(log_vec(w), div(lost, w));
  return select(cmp_gt(x, set1(20.0f)), x, y);
}

inline Vec silu(Vec x) { return div(x, add(set1(1.0f), exp_vec(sub(zero(), x)))); }

inline Vec gelu_tanh(Vec x) {
  Vec inner = mul(x, fma(mul(x, x), set1(0.044715f * 0.79788456f), set1(0.79788456f)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh_vec(inner)));
}

// Abramowitz and Stegun 7.1.26, degree 5 in t = 1 / (1 + p|x|); absolute error below 1.5e-7.
inline Vec erf_vec(Vec x) {
  Vec magnitude = as_float(and_i(as_int(x), set1_i(0x7fffffff)));
  Vec t = div(set1(1.0f), fma(magnitude, set1(0.3275911f), set1(1.0f)));
  Vec p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  Vec y = fnma(mul(p, t), exp_vec(sub(zero(), mul(x, x))), set1(1.0f));
  VecI sign = and_i(as_int(x), set1_i(0x80000000u));
  return as_float(or_i(as_int(y), sign));
}

inline Vec gelu(Vec x) {
  return mul(mul(set1(0.5f), x), add(set1(1.0f), erf_vec(mul(x, set1(0.70710678f)))));
}

// gate · sigmoid(1.702 gate) · (1 + up) of a gate of at most 7 and an up from -7 to 7.
inline Vec clamped_swiglu(Vec gate, Vec up) {
  constexpr float kAlpha = 1.702f, kLimit = 7.0f;
  gate = min(set1(kLimit), gate);
  up = min(set1(kLimit), max(set1(-kLimit), up));
  return mul(add(up, set1(1.0f)), mul(gate, sigmoid(mul(gate, set1(kAlpha)))));
}

}  // namespace cadenza::CADENZA_ISA
