// Tiles of bf16 by tensor cores. An element's sum is one accumulator, to which steps of 16 elements of
// K are added in ascending order, whatever the tile: so all tiles give the same bits.
#pragma once

#include "cuda/tiles.h"

namespace cadenza::cuda {

// Warps along weight rows and along tokens; each has `MT` times 16 weight rows by `NT` times 8 tokens.
template <int WarpsN, int WarpsT, int MT, int NT>
struct TensorMath {
  static_assert(NT == 1 || NT % 2 == 0);
  using T = bf16;
  static constexpr int kThreads = WarpsN * WarpsT * kWarp;
  static constexpr int kRows = WarpsN * MT * 16, kTokens = WarpsT * NT * 8;
  static constexpr int kHalf = MT / 2 * 16;
  static constexpr int kSteps = kStageElements<bf16> / 16;
  // Few sums wait for each other's steps.
  static constexpr bool kReadsAhead = MT * NT <= 2;

  struct Stage {
    uint32_t a[kSteps][MT][4], b[kSteps][NT][2];
  };

  float sums[MT][NT][4] = {};

  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % kWarp; }
  static __device__ __forceinline__ int first_row() { return int(threadIdx.x) / kWarp % WarpsN * (MT * 16); }
  static __device__ __forceinline__ int first_token() { return int(threadIdx.x) / kWarp / WarpsN * (NT * 8); }

  // A step's chunks of K are 2 step and 2 step + 1.
  __device__ __forceinline__ void load_weights(uint32_t (&a)[MT][4], const unsigned char* w, int step) const {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const int row = first_row() + m * 16 + lane() % 16;
      warp_load_matrices(a[m], w + chunk_at(row, 2 * step + lane() / 16));
    }
  }

  // Two tiles of tokens at a time; of a single one two steps, the first of which is even.
  __device__ __forceinline__ void load_tokens(uint32_t (&b)[NT][2], const unsigned char* x, int step) const {
#pragma unroll
    for (int n = 0; n + 1 < NT; n += 2) {
      const int token = first_token() + n * 8 + lane() / 16 * 8 + lane() % 8;
      uint32_t r[4];
      warp_load_matrices(r, x + chunk_at(token, 2 * step + lane() / 8 % 2));
      b[n][0] = r[0], b[n][1] = r[1];
      b[n + 1][0] = r[2], b[n + 1][1] = r[3];
    }
  }
  __device__ __forceinline__ void load_two_steps(uint32_t (&first)[2], uint32_t (&second)[2], const unsigned char* x,
                                                 int step) const {
    uint32_t r[4];
    warp_load_matrices(r, x + chunk_at(first_token() + lane() % 8, 2 * step + lane() / 8));
    first[0] = r[0], first[1] = r[1];
    second[0] = r[2], second[1] = r[3];
  }

  __device__ __forceinline__ Stage load(const unsigned char* w, const unsigned char* x) const {
    Stage stage;
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      load_weights(stage.a[step], w, step);
      if constexpr (NT > 1) {
        load_tokens(stage.b[step], x, step);
      } else if (step % 2 == 0) {
        load_two_steps(stage.b[step][0], stage.b[step + 1][0], x, step);
      }
    }
    return stage;
  }
  __device__ __forceinline__ void multiply(const Stage& stage) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) add(stage.a[step], stage.b[step]);
  }

  __device__ __forceinline__ void add(const uint32_t (&a)[MT][4], const uint32_t (&b)[NT][2]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT; n++) warp_mma_bf16(sums[m][n], a[m], b[n]);
    }
  }

  __device__ __forceinline__ void multiply(const unsigned char* w, const unsigned char* x) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      uint32_t a[MT][4], b[NT][2];
      load_weights(a, w, step);
      load_tokens(b, x, step);
      add(a, b);
    }
  }

  // Of lane l = 4 g + t, sums[i] are of row g, 8 further for i of 2 and 3, and token 2 t + i % 2.
  template <class Visit>
  __device__ __forceinline__ void visit_tile(int m, int n, Visit visit) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      visit(first_row() + m * 16 + lane() / 4 + i / 2 * 8, first_token() + n * 8 + lane() % 4 * 2 + i % 2, i);
    }
  }
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        visit_tile(m, n, [&](int row, int token, int i) { visit(row, token, sums[m][n][i]); });
      }
    }
  }
  template <class Visit>
  __device__ __forceinline__ void each_pair(Visit visit) const {
    static_assert(MT % 2 == 0);
#pragma unroll
    for (int m = 0; m < MT / 2; m++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        visit_tile(m, n, [&](int row, int token, int i) {
          visit(row, token, sums[m][n][i], sums[m + MT / 2][n][i]);
        });
      }
    }
  }
};

}  // namespace cadenza::cuda
