// 2^x for softmax weights.
#pragma once

#include "cuda/math.h"

namespace cadenza::cuda {

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 127, within about 1 ulp, and exactly 1 for 0; below 2^-126 it stays there. NaN
// propagates. Only IEEE operations.
__device__ __forceinline__ float exp2_of(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 x 2^23: sums with it are integers
  x = at_least(x, -126.0f);
  const float shifted = x + kRounder;
  const float f = x - (shifted - kRounder);
  float p = 1.3264726e-3f;
  p = fmaf(p, f, 9.6715130e-3f);
  p = fmaf(p, f, 5.5507336e-2f);
  p = fmaf(p, f, 2.4022242e-1f);
  p = fmaf(p, f, 6.9314700e-1f);
  p = fmaf(p, f, 1.0f);
  return p * as_bits<float>((as_bits<uint32_t>(shifted) << 23) + 0x3f800000u);
}

}  // namespace cadenza::cuda
