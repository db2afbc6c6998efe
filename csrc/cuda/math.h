// exp, log, tanh, erf and activations, by the polynomials of kernels/math.h. NaN propagates.
//
// Only IEEE operations, so that the bits are the same on every GPU.
#pragma once

#include "core/tasks.h"
#include "cuda/device.h"

namespace cadenza::cuda {

// x 2^n for an integer n, rounded once; n is within twice the exponents of a float.
__device__ __forceinline__ float scale2(float x, float n) {
  const int half = int(n) / 2, rest = int(n) - half;
  return x * as_bits<float>(uint32_t(half + 127) << 23) * as_bits<float>(uint32_t(rest + 127) << 23);
}

// max and min that keep NaN of the first.
__device__ __forceinline__ float at_least(float x, float least) { return x < least ? least : x; }
__device__ __forceinline__ float at_most(float x, float most) { return x > most ? most : x; }

__device__ __forceinline__ float exp_of(float x) {
  if (x != x) return x;
  x = at_most(at_least(x, -104.0f), 89.0f);
  const float n = rintf(x * 1.44269504f);
  float r = fmaf(-n, 0.693359375f, x);
  r = fmaf(-n, -2.12194440e-4f, r);
  float p = 1.9841270e-4f;
  p = fmaf(p, r, 1.3888889e-3f);
  p = fmaf(p, r, 8.3333333e-3f);
  p = fmaf(p, r, 4.1666667e-2f);
  p = fmaf(p, r, 1.6666667e-1f);
  p = fmaf(p, r, 5.0e-1f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  return scale2(p, n);
}

// Natural logarithm of normal positive x, by atanh of (m - 1) / (m + 1) with m in [sqrt½, sqrt2).
__device__ __forceinline__ float log_of(float x) {
  const uint32_t shifted = as_bits<uint32_t>(x) + (0x3f800000u - 0x3f3504f3u);
  const int exponent = int(shifted >> 23) - 127;
  const float n = float(exponent);
  const float f = as_bits<float>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float s = f / (f + 2.0f), z = s * s;
  float p = 0.2222222222f;
  p = fmaf(p, z, 0.2857142857f);
  p = fmaf(p, z, 0.4f);
  p = fmaf(p, z, 0.6666666667f);
  const float low = fmaf(-s, fmaf(-z, p, f), n * -2.12194440e-4f);
  return low + f + n * 0.693359375f;
}

// log(1 - u) for u in (0, 1), corrected for the rounding of 1 - u.
__device__ __forceinline__ float log1p_neg(float u) {
  const float w = 1.0f - u;
  return log_of(w) + (1.0f - w - u) / w;
}

__device__ __forceinline__ float tanh_of(float x) {
  const float z = x * x;
  if (0.0625f > z) {
    float p = 2.1869488e-2f;
    p = fmaf(p, z, -5.3968254e-2f);
    p = fmaf(p, z, 1.3333333e-1f);
    p = fmaf(p, z, -3.3333333e-1f);
    return fmaf(p * z, x, x);
  }
  return 1.0f - 2.0f / (exp_of(x + x) + 1.0f);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_of(0.0f - x)); }

// log(1 + e^x), corrected for the rounding of 1 + e^x; x where e^-x is lost in it.
__device__ __forceinline__ float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = exp_of(x), w = 1.0f + e;
  return log_of(w) + (e - (w - 1.0f)) / w;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp_of(0.0f - x)); }

__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = x * fmaf(x * x, 0.044715f * 0.79788456f, 0.79788456f);
  return 0.5f * x * (1.0f + tanh_of(inner));
}

// Abramowitz and Stegun 7.1.26; absolute error below 1.5e-7.
__device__ __forceinline__ float erf_of(float x) {
  const uint32_t raw = as_bits<uint32_t>(x);
  const float magnitude = as_bits<float>(raw & 0x7fffffffu);
  const float t = 1.0f / fmaf(magnitude, 0.3275911f, 1.0f);
  float p = 1.061405429f;
  p = fmaf(p, t, -1.453152027f);
  p = fmaf(p, t, 1.421413741f);
  p = fmaf(p, t, -0.284496736f);
  p = fmaf(p, t, 0.254829592f);
  const float y = fmaf(-(p * t), exp_of(0.0f - x * x), 1.0f);
  return as_bits<float>(as_bits<uint32_t>(y) | (raw & 0x80000000u));
}

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); }

__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  constexpr float kAlpha = 1.702f, kLimit = 7.0f;
  gate = at_most(gate, kLimit);
  up = at_most(at_least(up, -kLimit), kLimit);
  return (up + 1.0f) * (gate * sigmoid(gate * kAlpha));
}

__device__ __forceinline__ float gated(Activation activation, float gate, float up) {
  switch (activation) {
    case Activation::kSilu:
      return silu(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kGelu:
      return gelu(gate) * up;
    case Activation::kClampedSwiglu:
      return clamped_swiglu(gate, up);
  }
  return gate;
}

}  // namespace cadenza::cuda
