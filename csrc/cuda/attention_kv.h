// How blocks multiply queries, keys, weights and values of each type of KV.
//
// A type gives the layout of a stage of tokens in shared memory and of weights beside it, and is used
// by warps: of lane l = 4 g + t, scores and numerators are of rows g and g + 8, as warp_mma_bf16 has
// them. Rows are padded, so that eight of them are in different banks.
#pragma once

#include "cuda/attention.h"

namespace cadenza::cuda {

constexpr int kRowPadding = 16;  // bytes

// The lane's row and its byte of a fragment of [16, 32 bytes] that warp_load_matrices loads as an A;
// transposed, as the B of two tiles of eight columns.
__device__ __forceinline__ int row_of_lane() { return int(threadIdx.x) % 16; }
__device__ __forceinline__ int byte_of_lane() { return int(threadIdx.x) % kWarp / 16 * 16; }

// Copies rows of 16-byte units to shared memory; units behind `size` and rows outside are zeros.
struct RowCopy {
  const char* from;  // of the first row; consecutive ones are `stride` bytes apart
  int stride;
  int begin, end;    // of the rows that exist
  int size;          // units of a row that exist

  // By all `kThreads` threads of a block; swizzled, the same unit of eight rows is in different banks.
  template <int kThreads, int kRows, int kUnits, int kPitch, bool kSwizzled = false>
  __device__ __forceinline__ void run(unsigned char* to) const {
    static_assert(!kSwizzled || kUnits % 8 == 0);
    constexpr int kCopies = (kRows * kUnits + kThreads - 1) / kThreads;
#pragma unroll
    for (int copy = 0; copy < kCopies; copy++) {
      const int i = int(threadIdx.x) + copy * kThreads;
      if (kRows * kUnits % kThreads != 0 && i >= kRows * kUnits) continue;
      const int row = i / kUnits, unit = i % kUnits;
      const bool holds = row >= begin && row < end && unit < size;
      unsigned char* at = to + row * kPitch + (kSwizzled ? unit ^ (row & 7) : unit) * 16;
      copy_async(at, from + (holds ? row * stride + unit * 16 : 0), holds);
    }
  }
};

// A sub-block's place in the pools: tokens [begin, end) of it are read.
struct SubPlace {
  int64_t token;  // its first one, of all tokens of the pool's layers and heads
  int begin, end;
};

// Keys and values of `T`; latents, without kHasValues, are keys that begin with their value.
template <class T, int kKey_, int kValue_, int kTokens_, int kStages_, bool kHasValues>
struct FloatKv {
  static constexpr int kKey = kKey_, kValue = kValue_, kTokens = kTokens_, kStages = kStages_;
  static constexpr int kBytes = int(sizeof(T)), kUnits = kKey * kBytes / 16;
  static constexpr bool kSwizzled = kBytes == 2;  // as the tensor cores' fragments are loaded
  static constexpr int kPitch = kKey * kBytes + (kSwizzled ? 0 : kRowPadding);
  static constexpr int kQueryBytes = kKey * kBytes + kRowPadding;  // of a row
  static constexpr int kWeightPitch = kTokens * kBytes + kRowPadding;
  static_assert(kHasValues ? kKey == kValue : kKey >= kValue);

  struct alignas(16) Stage {
    unsigned char keys[kTokens * kPitch];
    unsigned char own_values[kHasValues ? kTokens * kPitch : 16];
    __device__ const unsigned char* values() const { return kHasValues ? own_values : keys; }
  };

  static __device__ __forceinline__ void load_query(const Attention& a, int64_t head, bool holds,
                                                    unsigned char* to, int lane) {
    const char* from = a.queries + (holds ? head * a.key_size * kBytes : 0);
    const int size = a.key_size * kBytes / 16;
    for (int unit = lane; unit < kUnits; unit += kWarp) {
      const bool has = holds && unit < size;
      copy_async(to + unit * 16, from + (has ? unit * 16 : 0), has);
    }
  }

  template <int kThreads>
  static __device__ __forceinline__ void load(const Attention& a, Stage& stage, int sub, SubPlace place) {
    const int row = a.key_size * kBytes, offset = sub * kSub * kPitch;
    const int64_t at = place.token * row;
    const RowCopy keys{a.k_pool + at, row, place.begin, place.end, row / 16};
    keys.run<kThreads, kSub, kUnits, kPitch, kSwizzled>(stage.keys + offset);
    if constexpr (kHasValues) {
      const RowCopy values{a.v_pool + at, row, place.begin, place.end, row / 16};
      values.run<kThreads, kSub, kUnits, kPitch, kSwizzled>(stage.own_values + offset);
    }
  }

  static __device__ __forceinline__ float key_scale(const Stage&, int) { return 1.0f; }
  static __device__ __forceinline__ float scaled(float score, float, float) { return score; }
};

template <int kKey, int kValue, int kTokens, int kStages, bool kHasValues = true>
struct Bf16Kv : FloatKv<bf16, kKey, kValue, kTokens, kStages, kHasValues> {
  using Base = FloatKv<bf16, kKey, kValue, kTokens, kStages, kHasValues>;
  using Stage = typename Base::Stage;
  using Base::kPitch;
  using Base::kQueryBytes;
  using Base::kWeightPitch;
  using Sum = float;
  static constexpr bool kHasCodes = false;

  // The scores of the sub-blocks split, split + Split, ... and a warp's queries: [][2 tiles][4].
  template <int Own, int Split>
  static __device__ __forceinline__ void score(float (&s)[Own][2][4], const unsigned char* queries,
                                               const Stage& stage, int split) {
    const int lane = int(threadIdx.x) % kWarp;
    const unsigned char* own = queries + row_of_lane() * kQueryBytes + byte_of_lane();
    const unsigned char* keys = stage.keys + (lane / 16 * 8 + lane % 8) * kPitch;
    const int swizzle = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < kKey / 16; k++) {
      uint32_t q[4];
      warp_load_matrices(q, own + k * 32);
#pragma unroll
      for (int u = 0; u < Own; u++) {
        const int sub = split + u * Split;
        if (sub >= kTokens / kSub) continue;
        uint32_t r[4];
        warp_load_matrices(r, keys + sub * kSub * kPitch + (k * 32 ^ swizzle));
        warp_mma_bf16(s[u][0], q, {r[0], r[1]});
        warp_mma_bf16(s[u][1], q, {r[2], r[3]});
      }
    }
  }

  // Stores the weights of a sub-block, rounded, and returns what they are then.
  static __device__ __forceinline__ void store(unsigned char* weights, int sub, float (&p)[2][4]) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float &x = p[j][half * 2], &y = p[j][half * 2 + 1];
        const bf16 low = to_bf16(x), high = to_bf16(y);
        x = to_float(low), y = to_float(high);
        unsigned char* at = weights + (g + half * 8) * kWeightPitch + (sub * kSub + j * 8 + t * 2) * 2;
        *reinterpret_cast<uint32_t*>(at) = uint32_t(low.bits) | uint32_t(high.bits) << 16;
      }
    }
  }

  // Adds to the numerators of a warp's rows, and its columns from `column` on.
  template <int Tiles>
  static __device__ __forceinline__ void add_values(float (&sum)[Tiles][4], const unsigned char* weights,
                                                    const float*, const Stage& stage, int column) {
    const int lane = int(threadIdx.x) % kWarp, swizzle = (lane / 16 ^ lane % 8) * 16;
    const unsigned char* own = weights + row_of_lane() * kWeightPitch + byte_of_lane();
    const unsigned char* values = stage.values() + row_of_lane() * kPitch;
#pragma unroll
    for (int sub = 0; sub < kTokens / kSub; sub++) {
      uint32_t p[4];
      warp_load_matrices(p, own + sub * 32);
#pragma unroll
      for (int n = 0; n < Tiles; n += 2) {
        uint32_t r[4];
        warp_load_transposed(r, values + sub * kSub * kPitch + ((column * 2 + n * 16) ^ swizzle));
        warp_mma_bf16(sum[n], p, {r[0], r[1]});
        warp_mma_bf16(sum[n + 1], p, {r[2], r[3]});
      }
    }
  }
};

// The same by single threads' sums in ascending order.
template <int kKey, int kValue, int kTokens, int kStages, bool kHasValues = true>
struct F32Kv : FloatKv<float, kKey, kValue, kTokens, kStages, kHasValues> {
  using Base = FloatKv<float, kKey, kValue, kTokens, kStages, kHasValues>;
  using Stage = typename Base::Stage;
  using Base::kPitch;
  using Base::kQueryBytes;
  using Base::kWeightPitch;
  static constexpr bool kHasCodes = false;

  template <int Own, int Split>
  static __device__ __forceinline__ void score(float (&s)[Own][2][4], const unsigned char* queries,
                                               const Stage& stage, int split) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int u = 0; u < Own; u++) {
      const int sub = split + u * Split;
      if (sub >= kTokens / kSub) continue;
      const unsigned char* keys = stage.keys + (sub * kSub + t * 2) * kPitch;
#pragma unroll 2
      for (int k = 0; k < kKey * 4; k += 16) {
        const float4 q[2] = {four(queries + g * kQueryBytes + k), four(queries + (g + 8) * kQueryBytes + k)};
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float4 key = four(keys + (c / 2 * 8 + c % 2) * kPitch + k);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float& sum = s[u][c / 2][half * 2 + c % 2];
            sum = fmaf(q[half].x, key.x, sum);
            sum = fmaf(q[half].y, key.y, sum);
            sum = fmaf(q[half].z, key.z, sum);
            sum = fmaf(q[half].w, key.w, sum);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void store(unsigned char* weights, int sub, float (&p)[2][4]) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned char* at = weights + (g + i % 2 * 8) * kWeightPitch + (sub * kSub + i / 2 * 8 + t * 2) * 4;
      *reinterpret_cast<float2*>(at) = make_float2(p[i / 2][i % 2 * 2], p[i / 2][i % 2 * 2 + 1]);
    }
  }

  template <int Tiles>
  static __device__ __forceinline__ void add_values(float (&sum)[Tiles][4], const unsigned char* weights,
                                                    const float*, const Stage& stage, int column) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
    const unsigned char* values = stage.values() + (column + t * 2) * 4;
#pragma unroll 2
    for (int token = 0; token < kTokens; token++) {
      const float p0 = *reinterpret_cast<const float*>(weights + g * kWeightPitch + token * 4);
      const float p1 = *reinterpret_cast<const float*>(weights + (g + 8) * kWeightPitch + token * 4);
#pragma unroll
      for (int n = 0; n < Tiles; n++) {
        const float2 v = *reinterpret_cast<const float2*>(values + token * kPitch + n * 32);
        sum[n][0] = fmaf(p0, v.x, sum[n][0]);
        sum[n][1] = fmaf(p0, v.y, sum[n][1]);
        sum[n][2] = fmaf(p1, v.x, sum[n][2]);
        sum[n][3] = fmaf(p1, v.y, sum[n][3]);
      }
    }
  }

 private:
  static __device__ __forceinline__ float4 four(const unsigned char* at) {
    return *reinterpret_cast<const float4*>(at);
  }
};

}  // namespace cadenza::cuda
