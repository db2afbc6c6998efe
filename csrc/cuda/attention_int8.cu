// Attention over KV in int8: the codes of core/kv_codes.h, whose dots are exact integers.
#include "cuda/attention_block.h"

namespace cadenza::cuda {

namespace {

// Weights of a sub-block are quantised by the largest of them beside the block's maximum.
template <int kKey_, int kTokens_, int kStages_>
struct CodeKv {
  static constexpr int kKey = kKey_, kValue = kKey_, kTokens = kTokens_, kStages = kStages_;
  static constexpr bool kHasCodes = true;
  static constexpr int kPitch = kKey + kRowPadding;
  static constexpr int kQueryBytes = 2 * kPitch;  // coarse codes, then fine ones
  static constexpr int kStepPitch = kKey * 4 + 2 * kRowPadding;  // of the values of four tokens
  static constexpr int kWeightPitch = kTokens + kRowPadding;

  struct alignas(16) Stage {
    unsigned char keys[kTokens * kPitch];
    unsigned char values[kTokens / 4 * kStepPitch];
    float key_scales[kTokens], value_scales[kTokens];
  };

  static __device__ __forceinline__ void load_query(const Attention& a, int64_t head, bool holds,
                                                    unsigned char* to, int lane) {
    const char* from = a.queries + (holds ? 2 * head * a.key_size : 0);
    for (int i = lane; i < 2 * (kKey / 16); i += kWarp) {
      const int part = i / (kKey / 16), unit = i % (kKey / 16);
      const bool has = holds && unit < a.key_size / 16;
      copy_async(to + part * kPitch + unit * 16, from + (has ? part * a.key_size + unit * 16 : 0), has);
    }
  }

  template <int kThreads>
  static __device__ __forceinline__ void load(const Attention& a, Stage& stage, int sub, SubPlace place) {
    const int64_t at = place.token / kSub * kSub * code_bytes(a.key_size);
    const char *keys = a.k_pool + at, *values = a.v_pool + at;
    const int size = a.key_size;
    const RowCopy rows{keys, size, place.begin, place.end, size / 16};
    rows.run<kThreads, kSub, kKey / 16, kPitch>(stage.keys + sub * kSub * kPitch);
    const int steps = place.end > place.begin ? kSub / 4 : 0;
    const RowCopy columns{values, size * 4, 0, steps, size / 4};
    columns.run<kThreads, kSub / 4, kKey / 4, kStepPitch>(stage.values + sub * (kSub / 4) * kStepPitch);
    if (threadIdx.x >= 8) return;
    const int unit = int(threadIdx.x) % 4;
    const char* from = (threadIdx.x < 4 ? keys : values) + kSub * size + unit * 16;
    float* to = (threadIdx.x < 4 ? stage.key_scales : stage.value_scales) + sub * kSub + unit * 4;
    copy_async(to, steps > 0 ? from : a.k_pool, steps > 0);
  }

  static __device__ __forceinline__ float key_scale(const Stage& stage, int token) { return stage.key_scales[token]; }
  static __device__ __forceinline__ float scaled(float dot, float query_scale, float key_scale) {
    return dot * query_scale * key_scale;
  }

  template <int Own, int Split>
  static __device__ __forceinline__ void score(float (&s)[Own][2][4], const unsigned char* queries,
                                               const Stage& stage, int split) {
    const int lane = int(threadIdx.x) % kWarp;
    const unsigned char* own = queries + row_of_lane() * kQueryBytes + byte_of_lane();
    const unsigned char* keys = stage.keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int u = 0; u < Own; u++) {
      const int sub = split + u * Split;
      if (sub >= kTokens / kSub) continue;
      int32_t coarse[2][4] = {}, fine[2][4] = {};
#pragma unroll
      for (int k = 0; k < kKey; k += 32) {
        uint32_t q[4], f[4], r[4];
        warp_load_matrices(q, own + k);
        warp_load_matrices(f, own + kPitch + k);
        warp_load_matrices(r, keys + sub * kSub * kPitch + k);
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] ^= 0x80808080u;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          warp_mma_int8(coarse[j], q, {r[2 * j], r[2 * j + 1]});
          warp_mma_int8(fine[j], f, {r[2 * j], r[2 * j + 1]});
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) s[u][i / 4][i % 4] = float(kFinePerCoarse * coarse[i / 4][i % 4] + fine[i / 4][i % 4]);
    }
  }

  // Stores the codes of a sub-block's weights times the values' scales, and their scales [16][].
  static __device__ __forceinline__ void store(unsigned char* weights, float* scales, const Stage& stage,
                                               int sub, const float (&p)[2][4]) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
    const float* of_values = stage.value_scales + sub * kSub + t * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float w[4];
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float weight = p[i / 2][half * 2 + i % 2];
        w[i] = weight == 0.0f ? 0.0f : weight * of_values[i / 2 * 8 + i % 2];
        largest = max(largest, as_bits<uint32_t>(w[i]) & 0x7fffffffu);
      }
      largest = max(largest, warp_shuffle_xor(largest, 1));
      largest = max(largest, warp_shuffle_xor(largest, 2));
      const bool has_codes = largest >= kSmallestLargest && largest < 0x7f800000u;
      const float most = as_bits<float>(largest), inverse = has_codes ? kMostWeightCode / most : 0.0f;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t low = code(w[2 * j] * inverse), high = code(w[2 * j + 1] * inverse);
        unsigned char* at = weights + (g + half * 8) * kWeightPitch + sub * kSub + j * 8 + t * 2;
        *reinterpret_cast<uint16_t*>(at) = uint16_t(low | high << 8);
      }
      const float none = largest < kSmallestLargest ? 0.0f : as_bits<float>(0x7fc00000u);
      if (t == 0) scales[(g + half * 8) * (kTokens / kSub) + sub] = has_codes ? most / kMostWeightCode : none;
    }
  }
  static __device__ __forceinline__ uint32_t code(float exact) { return exact > 0.0f ? uint32_t(rintf(exact)) : 0; }

  template <int Tiles>
  static __device__ __forceinline__ void add_values(float (&sum)[Tiles][4], const unsigned char* weights,
                                                    const float* scales, const Stage& stage, int column) {
    const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int sub = 0; sub < kTokens / kSub; sub++) {
      const unsigned char* own = weights + g * kWeightPitch + sub * kSub + t * 4;
      const uint32_t w[2] = {word(own), word(own + 8 * kWeightPitch)};
      const float scale[2] = {scales[g * (kTokens / kSub) + sub], scales[(g + 8) * (kTokens / kSub) + sub]};
      const unsigned char* values = stage.values + (sub * (kSub / 4) + t) * kStepPitch + (column + g) * 4;
#pragma unroll
      for (int n = 0; n < Tiles; n++) {
        int32_t dots[4] = {};
        warp_mma_uint8(dots, w, word(values + n * 32));
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = fmaf(float(dots[i]), scale[i / 2], sum[n][i]);
      }
    }
  }
  static __device__ __forceinline__ uint32_t word(const unsigned char* at) {
    return *reinterpret_cast<const uint32_t*>(at);
  }
};

}  // namespace

void attend_int8(const Attention& a, const Pieces& pieces) {
  if (a.key_size <= 64) {
    attend_with<CodeKv<64, 64, 2>, code_row_groups(64), 1, 4>(a, pieces);
  } else if (a.key_size <= 128) {
    attend_with<CodeKv<128, 64, 2>, code_row_groups(128), 2, 4>(a, pieces);
  } else if (a.key_size <= 256) {
    attend_with<CodeKv<256, 32, 2>, code_row_groups(256), 4, 4>(a, pieces);
  } else {
    attend_with<CodeKv<512, 16, 2>, code_row_groups(512), 4, 4>(a, pieces);
  }
}

}  // namespace cadenza::cuda
