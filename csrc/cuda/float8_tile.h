// A tile of rows times a panel of e4m3 codes: core/float8.h has the layout and the arithmetic.
//
// Each warp multiplies a block of 128 elements of K in a round, as a dense product with the codes'
// values, which are exact in bf16; the sums of the round's blocks are in shared memory, where each
// thread folds those of its column and its rows in ascending order.
#pragma once

#include "cuda/half.h"
#include "cuda/panel_block.h"

namespace cadenza::cuda {

template <int NR>
struct Float8Memory {
  static constexpr int kPairs = 4 * NR;
  static constexpr int kStride = 2 * kPanel + 2;     // no two lanes store to one bank
  float sums[kPanelWarps][kPairs][kStride];          // [block of the round, .., column, row of the pair]
  float scales[kPanelWarps][kPanel];
  const void* sources[8 * NR];                       // the rows of x
  int32_t targets[8 * NR];
};

// Two codes as values in float32; a NaN's value is of no account, as its scale is NaN.
struct TwoValues {
  float first, second;
};
__device__ __forceinline__ float float8_to_float(uint32_t code) {
  // The code's bits are those of a value in f16 whose exponent's bias is greater by 8; none of f32 is denormal.
  const float magnitude = half_to_float((code & 0x7f) << 7) * 256.0f;
  return as_bits<float>(as_bits<uint32_t>(magnitude) | (code & 0x80) << 24);
}
__device__ __forceinline__ TwoValues two_values(uint32_t codes) {
  return {float8_to_float(codes & 0xff), float8_to_float(codes >> 8 & 0xff)};
}
__device__ __forceinline__ uint32_t two_bf16(uint32_t codes) {
  const TwoValues values = two_values(codes);
  return as_bits<uint32_t>(values.first) >> 16 | (as_bits<uint32_t>(values.second) & 0xffff0000u);
}

// What a tile reads.
struct Float8Rows {
  int64_t k;
  int blocks;
  int count;           // rows that are there
  bool has_pairs;      // elements 2 i and 2 i + 1 of each row are one aligned word
  const uint8_t* panel;

  __device__ __forceinline__ const uint8_t* block(int index) const {
    constexpr int64_t kBytes = kFloat8ScaleBytes + kFloat8Block / 2 * kFloat8StepBytes;
    return panel + index * kBytes;
  }
  __device__ __forceinline__ int steps(int index) const {
    const int64_t left = k - int64_t(index) * kFloat8Block;
    return int(((left < kFloat8Block ? left : kFloat8Block) + 1) / 2);
  }
};

// The dense product of a block by tensor cores, of activations in bf16.
template <int NR>
struct Float8Tensors {
  using T = bf16;
  static constexpr int kChunks = kFloat8Block / 16;  // steps of the tensor cores
  uint2 codes[kChunks][2];

  // The codes of four columns, 4 g to 4 g + 3, at two elements of K, and at those eight further.
  __device__ __forceinline__ void load(const Float8Rows& x, int block, int chunk) {
    const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int step = chunk * 8 + half * 4 + lane % 4;
      codes[chunk][half] = make_uint2(0, 0);
      if (block >= x.blocks || step >= x.steps(block)) continue;
      const uint8_t* at = x.block(block) + kFloat8ScaleBytes + step * kFloat8StepBytes + lane / 4 * 8;
      codes[chunk][half] = load_constant(reinterpret_cast<const uint2*>(at));
    }
  }

  // Elements `at` and at + 1 of a row, zero behind K.
  __device__ __forceinline__ static uint32_t two_elements(const Float8Rows& x, const void* row, int64_t at) {
    const auto* elements = static_cast<const uint16_t*>(row) + at;
    if (x.has_pairs) return at < x.k ? load_constant(reinterpret_cast<const uint32_t*>(elements)) : 0;
    const uint32_t first = at < x.k ? elements[0] : 0, second = at + 1 < x.k ? elements[1] : 0;
    return first | second << 16;
  }

  // Multiplies a block, and loads block `next` as it goes.
  __device__ __forceinline__ void multiply(Float8Memory<NR>& memory, const Float8Rows& x, int block, int next) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    float d[2][NR][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint2 four = codes[chunk][half];
        a[0][2 * half] = two_bf16(four.x & 0xffff);
        a[0][2 * half + 1] = two_bf16(four.x >> 16);
        a[1][2 * half] = two_bf16(four.y & 0xffff);
        a[1][2 * half + 1] = two_bf16(four.y >> 16);
      }
      load(x, next, chunk);
      const int64_t at = int64_t(block) * kFloat8Block + chunk * 16 + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < NR; r++) {
        const void* row = memory.sources[r * kRowsOfProduct + lane / 4];
        const uint32_t b[2] = {two_elements(x, row, at), two_elements(x, row, at + 8)};
        warp_mma_bf16(d[0][r], a[0], b);
        warp_mma_bf16(d[1][r], a[1], b);
      }
    }
#pragma unroll
    for (int r = 0; r < NR; r++) {
      float* to = memory.sums[warp][r * 4 + lane % 4] + lane / 4 * 8;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        *reinterpret_cast<float2*>(to + 4 * j) = make_float2(d[j][r][0], d[j][r][1]);
        *reinterpret_cast<float2*>(to + 4 * j + 2) = make_float2(d[j][r][2], d[j][r][3]);
      }
    }
  }
};

// The same of activations in float32: a lane has a column, whose sums are chains over ascending K.
template <int NR>
struct Float8Chains {
  using T = float;
  static constexpr int kChunks = 0;

  __device__ __forceinline__ void load(const Float8Rows&, int, int) {}

  __device__ __forceinline__ void multiply(Float8Memory<NR>& memory, const Float8Rows& x, int block, int) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    float sums[8 * NR] = {};
    const uint8_t* codes = x.block(block) + kFloat8ScaleBytes + lane * 2;
    for (int step = 0; step < x.steps(block); step++) {
      const auto* at = reinterpret_cast<const uint16_t*>(codes + step * kFloat8StepBytes);
      const TwoValues values = two_values(load_constant(at));
      const int64_t k = int64_t(block) * kFloat8Block + 2 * step;
#pragma unroll
      for (int row = 0; row < 8 * NR; row++) {
        const auto* elements = static_cast<const float*>(memory.sources[row]) + k;
        sums[row] = fmaf(values.first, elements[0], sums[row]);
        if (k + 1 < x.k) sums[row] = fmaf(values.second, elements[1], sums[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < 8 * NR; row++) memory.sums[warp][row / 2][2 * lane + row % 2] = sums[row];
  }
};

template <class Math, int NR>
__device__ __forceinline__ void multiply_float8(Float8Memory<NR>& memory, const Float8Rows& x, PanelSums<NR>& sums) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  for (auto& pair : sums.of) pair[0] = pair[1] = 0.0f;
  Math math;
#pragma unroll
  for (int chunk = 0; chunk < Math::kChunks; chunk++) math.load(x, warp, chunk);
  for (int first = 0; first < x.blocks; first += kPanelWarps) {
    const int block = first + warp;
    if (block < x.blocks) {
      memory.scales[warp][lane] = load_constant(reinterpret_cast<const float*>(x.block(block)) + lane);
      math.multiply(memory, x, block, block + kPanelWarps);
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PanelSums<NR>::kPairs; p++) {
      const int pair = warp + kPanelWarps * p;
      if (pair >= Float8Memory<NR>::kPairs) break;
      for (int i = 0; i < min(kPanelWarps, x.blocks - first); i++) {
        const float2 own = *reinterpret_cast<const float2*>(memory.sums[i][pair] + 2 * lane);
        sums.of[p][0] = fmaf(own.x, memory.scales[i][lane], sums.of[p][0]);
        sums.of[p][1] = fmaf(own.y, memory.scales[i][lane], sums.of[p][1]);
      }
    }
    __syncthreads();
  }
}

}  // namespace cadenza::cuda
