// Tiles of float32: an element's sum is one chain of fused multiply-adds over ascending K.
#pragma once

#include "cuda/tiles.h"

namespace cadenza::cuda {

// Each warp has `R` times 32 weight rows, which the warps share, by `Tokens` tokens of its own.
template <int Warps, int R, int Tokens>
struct ChainMath {
  using T = float;
  static constexpr int kThreads = Warps * kWarp;
  static constexpr int kRows = R * kWarp, kTokens = Warps * Tokens;
  static constexpr int kHalf = kRows / 2;
  static constexpr bool kReadsAhead = false;  // a warp has many chains of sums

  float sums[R][Tokens] = {};

  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % kWarp; }
  static __device__ __forceinline__ int first_token() { return int(threadIdx.x) / kWarp * Tokens; }
  static __device__ __forceinline__ float4 load(const unsigned char* stage, int row, int chunk) {
    return *reinterpret_cast<const float4*>(stage + chunk_at(row, chunk));
  }

  __device__ __forceinline__ void multiply(const unsigned char* w, const unsigned char* x) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      float4 weights[R];
#pragma unroll
      for (int r = 0; r < R; r++) weights[r] = load(w, r * kWarp + lane(), chunk);
#pragma unroll
      for (int token = 0; token < Tokens; token++) {
        const float4 value = load(x, first_token() + token, chunk);
#pragma unroll
        for (int r = 0; r < R; r++) {
          float sum = fmaf(weights[r].x, value.x, sums[r][token]);
          sum = fmaf(weights[r].y, value.y, sum);
          sum = fmaf(weights[r].z, value.z, sum);
          sums[r][token] = fmaf(weights[r].w, value.w, sum);
        }
      }
    }
  }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
      for (int token = 0; token < Tokens; token++) {
        visit(r * kWarp + lane(), first_token() + token, sums[r][token]);
      }
    }
  }
  template <class Visit>
  __device__ __forceinline__ void each_pair(Visit visit) const {
    static_assert(R % 2 == 0);
#pragma unroll
    for (int r = 0; r < R / 2; r++) {
#pragma unroll
      for (int token = 0; token < Tokens; token++) {
        visit(r * kWarp + lane(), first_token() + token, sums[r][token], sums[r + R / 2][token]);
      }
    }
  }
};

}  // namespace cadenza::cuda
