// Elements of a row side by side: as many as 16 bytes of bf16 hold where rows allow it, else one.
#pragma once

#include "cuda/device.h"

namespace cadenza::cuda {

constexpr int kSideBySide = 8;

// Whether rows of such a width begin at multiples of kSideBySide elements, and of 16 bytes.
inline bool has_whole_vectors(int64_t width) { return width % kSideBySide == 0; }

template <int N>
__device__ __forceinline__ void load_elements(const float* from, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = *from;
  } else {
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  }
}

template <int N>
__device__ __forceinline__ void load_elements(const bf16* from, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = to_float(*from);
  } else {
    static_assert(N == kSideBySide);
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    for (int i = 0; i < 4; i++) {
      to[2 * i] = as_bits<float>(pairs[i] << 16);
      to[2 * i + 1] = as_bits<float>(pairs[i] & 0xffff0000u);
    }
  }
}

template <int N>
__device__ __forceinline__ void store_elements(float* to, const float (&from)[N]) {
  if constexpr (N == 1) {
    *to = from[0];
  } else {
    for (int i = 0; i < N; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  }
}

template <int N>
__device__ __forceinline__ void store_elements(bf16* to, const float (&from)[N]) {
  if constexpr (N == 1) {
    *to = to_bf16(from[0]);
  } else {
    static_assert(N == kSideBySide);
    uint32_t pairs[4];
    for (int i = 0; i < 4; i++) {
      pairs[i] = uint32_t(to_bf16(from[2 * i]).bits) | uint32_t(to_bf16(from[2 * i + 1]).bits) << 16;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace cadenza::cuda
