// What attention does before it attends: queries are prepared, new keys and values are written to
// their pages, and the step's rows are divided.
#pragma once

#include "cuda/attention.h"

namespace cadenza::cuda {

// Of attention over keys and values of heads.
struct HeadAppend {
  int tokens;             // at most; query_starts[R] is their number
  const void* qkv;        // [T, (Hq + kv_parts Hkv) D]
  const int32_t* slot_mapping;
  const float* rope;      // [rope rows, columns]: cosines, sines, and factors of queries in an odd column
  int rope_rows, rope_columns, rotary_size;
  const float* q_weight;  // [D], or [Hq D] with norm_spans_heads; or null
  const float* k_weight;
  float norm_eps;
  bool norm_spans_heads, norms_values;
  int kv_parts;           // as of AttendTask
  int64_t num_slots;      // of the pool
  bool has_codes;         // the pools are int8
  char* queries;          // Attention::queries
  float* query_scales;
  char* k_pool;
  char* v_pool;
};

// Of attention over latents.
struct LatentAppend {
  int tokens;
  const void* absorbed;   // [T, Hq, L]
  const void* queries;    // [T, Hq, query_size], rotated at their ends
  const float* keys;      // [T, D]
  int query_size;
  bool pairs_neighbours;
  const int32_t* slot_mapping;
  const float* rope;
  int rope_rows, rotary_size;
  const float* norm;      // [L]
  float norm_eps;
  int64_t num_slots;
  char* prepared;         // Attention::queries
  char* pool;
};

void append_heads(const Attention& a, const HeadAppend& given, bool is_f32);
void append_latents(const Attention& a, const LatentAppend& given, bool is_f32);

// Four elements at a time; both places are aligned to four elements.
__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 load_four(const bf16* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  return make_float4(as_bits<float>(raw.x << 16), as_bits<float>(raw.x & 0xffff0000u),
                     as_bits<float>(raw.y << 16), as_bits<float>(raw.y & 0xffff0000u));
}
__device__ __forceinline__ void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  return uint32_t(to_bf16(low).bits) | uint32_t(to_bf16(high).bits) << 16;
}
__device__ __forceinline__ void store_four(bf16* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pair_of(x.x, x.y), pair_of(x.z, x.w));
}

// A head as it is changed, in shared memory of the warp that does it. Sizes are multiples of four.
struct WarpHead {
  float* values;
  int lane;

  template <class T>
  __device__ __forceinline__ void load(const T* from, int size) const {
    for (int i = lane * 4; i < size; i += kWarp * 4) store_four(values + i, load_four(from + i));
    warp_barrier();
  }
  // Writes the head as it is stored.
  template <class T>
  __device__ __forceinline__ void store(T* to, int size) const {
    warp_barrier();
    for (int i = lane * 4; i < size; i += kWarp * 4) store_four(to + i, load_four(values + i));
  }

  // Rotates the two halves of `size` elements from `first` on; the warp has a barrier behind it.
  __device__ __forceinline__ void rotate(const float* cosine, int first, int size) const {
    const int half = size / 2;
    float* own = values + first;
    for (int i = lane; i < half; i += kWarp) {
      const float a = own[i], b = own[half + i], c = cosine[i], s = cosine[half + i];
      own[i] = fmaf(-b, s, a * c);
      own[half + i] = fmaf(a, s, b * c);
    }
    warp_barrier();
  }
};

// 1 / RMS of `size` values, summed up in an order that follows from their number.
template <class T>
__device__ __forceinline__ float inverse_rms(const T* x, int size, float eps) {
  float sum = 0.0f;
  for (int i = int(threadIdx.x) % kWarp; i < size; i += kWarp) {
    const float value = to_float(x[i]);
    sum = fmaf(value, value, sum);
  }
  return 1.0f / sqrtf(warp_sum(sum) / float(size) + eps);
}

__device__ __forceinline__ int rope_row(const Attention& a, int token, int rows) {
  return min(max(a.rope_positions[token], 0), rows - 1);
}

// The largest magnitude of a vector in shared memory; without codes all codes are 0, and the scale is
// 0, or NaN beside an element that is not finite.
struct Largest {
  uint32_t bits;

  static __device__ __forceinline__ Largest of(const float* x, int size, int lane) {
    uint32_t most = 0;
    for (int i = lane; i < size; i += kWarp) most = max(most, as_bits<uint32_t>(x[i]) & 0x7fffffffu);
    for (int mask = kWarp / 2; mask > 0; mask /= 2) most = max(most, warp_shuffle_xor(most, mask));
    return {most};
  }
  __device__ bool has_codes() const { return bits >= kSmallestLargest && bits < 0x7f800000u; }
  __device__ float value() const { return as_bits<float>(bits); }
  // What elements are multiplied by for codes, and the scale of codes of which `per` make one.
  __device__ float inverse() const { return has_codes() ? kMostCode / value() : 0.0f; }
  __device__ float scale(float per) const {
    if (has_codes()) return value() / (kMostCode * per);
    return bits < kSmallestLargest ? 0.0f : as_bits<float>(0x7fc00000u);
  }
};

}  // namespace cadenza::cuda
