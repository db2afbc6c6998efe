// Ragged paged attention on a GPU: what its kernels are given, and how a step's work is divided.
//
// The definition, which does not depend on the number of rows, on chunks or on pages. A row's context
// is cut into parts of kPart tokens at absolute positions, and a part into blocks, whose size follows
// from the head size. Within a part a query has a maximum, a sum and a numerator, which blocks update
// in ascending order (online softmax); parts are merged in ascending order. A block outside a query's
// range leaves its state as it is, bit for bit, so it does not matter which queries share a tile.
// Tokens outside a query's range are masked by a select.
//
// Rows with few queries in the step are computed a part at a time, and the block that is the last one
// of a tile merges its partial results; of other rows a block runs over all parts of a tile of queries.
// Both do the same arithmetic. A first kernel appends keys and values, prepares queries and divides
// the rows; in the two that attend each block takes one piece of work after another.
//
// Pages are [S, D] for each KV head, a token behind the other. Of int8, sub-blocks of sixteen tokens
// are keys as [16][D] codes + 128, values as [16/4][D][4] codes, then the scales of the tokens.
#pragma once

#include "core/faults.h"
#include "core/kv_codes.h"
#include "core/quantised.h"
#include "cuda/attention_math.h"
#include "cuda/launch.h"

namespace cadenza::cuda {

// Tokens of a part. Smaller ones give more blocks to short contexts; larger ones fewer partials.
constexpr int kPart = 256;
// Rows with at most so many queries in the step are computed a part at a time.
constexpr int kFewQueries = 8;
// Queries of a tile of the tensor cores: a token's heads of one KV head, then the next token's.
constexpr int kTileRows = 16;
// Tokens of a sub-block, one step of the tensor cores.
constexpr int kSub = 16;
// The most bytes of partial results; steps that need more compute all rows as if of many queries.
#ifdef CADENZA_EMULATED_GPU
constexpr int64_t kMostPartialBytes = int64_t(1) << 20;
#else
constexpr int64_t kMostPartialBytes = int64_t(64) << 20;
#endif

// Bytes of the codes and the scale of a key or value.
__host__ __device__ constexpr int code_bytes(int head_size) { return head_size + int(sizeof(float)); }

// A row's queries, the tokens that they see, and the parts that hold these, at least one.
struct alignas(16) RowContext {
  int32_t first, queries;  // its tokens in the step
  int32_t begin, end;
  int32_t first_part, num_parts;
  int32_t shift;  // parts begin so much before multiples of kPart: 0 but for a fault
  int32_t slots;  // pairs of a query and a part in the rows before, of few queries
};

// How a step's rows are divided, computed on the device.
struct AttendPlan {
  RowContext* contexts;  // [R]
  int32_t* few;    // [R + 1]: pairs of a tile and a part in the rows before, of few queries
  int32_t* many;   // [R + 1]: tiles of the rows before, of many queries
  int32_t* taken;  // [2]: pieces of work that blocks took, of rows with few queries and with many
  int32_t* parts;  // [R, few_tiles, Hkv]: parts that are done
};

struct Attention {
  int rows, pages_per_row, page_size, num_layers, layer;
  int heads, kv_heads, key_size, value_size;
  int window;      // 0: none
  float scale;     // of scores, times log2 e; with a cap, over the cap
  float soft_cap;  // times log2 e; 0: none
  const int32_t* positions;
  const int32_t* rope_positions;  // rows of the appending kernels' rope
  const int32_t* query_starts;
  const int32_t* kv_lens;
  const int32_t* reaches;  // [T]: the last position that a token sees, if it is after its own; or null
  const int32_t* window_starts;  // [T]: the first position that a token sees with a window, or -1; or null
  const int32_t* page_table;
  // Prepared queries: [T, Hq, D], or of int8 [T, Hq, 2, D] coarse and fine codes.
  const char* queries;
  const float* query_scales;  // [T, Hq] of int8
  const char* k_pool;
  const char* v_pool;
  const float* sinks;  // [Hq], or null
  const void* gate;    // [T, Hq, D], or null
  void* out;           // [T, Hq, value size]
  bool out_is_f32;
  float* partials;  // [slots, Hq, partial_stride()]: numerator, maximum, denominator
  int num_slots;
  int few_tiles;  // of a row with few queries, at most
  int many_rows;  // queries of a tile of rows with many
  AttendPlan plan;
  Fault fault;

  __host__ __device__ int group() const { return heads / kv_heads; }
  // The first position that a token sees; ascends with the tokens of a row.
  __device__ __forceinline__ int begin_of_context(int token) const {
    if (window == 0) return 0;
    const int given = window_starts != nullptr ? window_starts[token] : -1;
    return given >= 0 ? given : max(0, positions[token] - window + 1);
  }
  // The position behind the last one that a token sees; ascends with the tokens of a row.
  __device__ __forceinline__ int end_of_context(int token) const {
    const int position = positions[token];
    return (reaches != nullptr ? max(position, reaches[token]) : position) + 1;
  }
  __host__ __device__ int partial_stride() const { return value_size + 4; }
  __device__ bool has(Fault which) const { return kHasFaults && fault == which; }
};

// The row that holds the piece of work `index`, of `before` [R + 1], by all lanes of a warp.
__device__ __forceinline__ int row_of(const int32_t* before, int rows, int index) {
  int passed = 0;
  for (int row = int(threadIdx.x) % kWarp; row < rows; row += kWarp) passed += before[row + 1] <= index;
  for (int mask = kWarp / 2; mask > 0; mask /= 2) passed += warp_shuffle_xor(passed, mask);
  return passed;
}

// How the next part's result joins those before it.
struct Merge {
  float keep, add, maximum;
  bool is_empty;  // the part has no token of the query's

  __device__ __forceinline__ Merge(float maximum_, float sum, float part_maximum, float part_sum)
      : is_empty(part_sum == 0.0f) {
    const bool is_first = sum == 0.0f;
    maximum = is_first ? part_maximum : fmaxf(maximum_, part_maximum);
    keep = is_first ? 0.0f : exp2_of(maximum_ - maximum);
    add = is_first ? 1.0f : exp2_of(part_maximum - maximum);
    if (is_empty) maximum = maximum_;
  }
  __device__ __forceinline__ float of(float before, float part) const {
    return is_empty ? before : before * keep + part * add;
  }
};

// What a numerator is multiplied by; with a sink, whose score is one more term of the denominator.
__device__ __forceinline__ float inverse_total(const Attention& a, float maximum, float sum, int head) {
  if (sum == 0.0f) return 0.0f;
  if (a.sinks == nullptr) return 1.0f / sum;
  const float sink = a.sinks[head] * kLog2e, highest = fmaxf(sink, maximum);
  const float keep = exp2_of(maximum - highest);
  return keep / (sum * keep + exp2_of(sink - highest));
}

// Two neighbouring elements of the output at index `at`, an even one.
__device__ __forceinline__ void write_output(const Attention& a, int64_t at, float x, float y) {
  if (a.out_is_f32) {
    const auto* gate = static_cast<const float*>(a.gate);
    if (gate != nullptr) x *= sigmoid(gate[at]), y *= sigmoid(gate[at + 1]);
    static_cast<float*>(a.out)[at] = x + 0.0f;  // zeros have one sign
    static_cast<float*>(a.out)[at + 1] = y + 0.0f;
  } else {
    const auto* gate = static_cast<const bf16*>(a.gate);
    if (gate != nullptr) x *= sigmoid(to_float(gate[at])), y *= sigmoid(to_float(gate[at + 1]));
    const uint32_t pair = uint32_t(to_bf16(x + 0.0f).bits) | uint32_t(to_bf16(y + 0.0f).bits) << 16;
    *reinterpret_cast<uint32_t*>(static_cast<bf16*>(a.out) + at) = pair;
  }
}

// Groups of sixteen queries of a tile of rows with many, by the size of a head, or of latents.
constexpr int row_groups(int head_size) { return head_size <= 128 ? 4 : head_size <= 256 ? 2 : 1; }
// Codes have more sums at a time in registers.
constexpr int code_row_groups(int head_size) { return head_size <= 64 ? 4 : head_size <= 128 ? 2 : 1; }
constexpr int kLatentGroups = 1;

// At most so many pieces of work there are, of rows with few queries and with many.
struct Pieces {
  int64_t few, many;
};

// Launch the kernels that attend.
void attend_bf16(const Attention& a, const Pieces& pieces);
void attend_f32(const Attention& a, const Pieces& pieces);
void attend_int8(const Attention& a, const Pieces& pieces);
void attend_latents_bf16(const Attention& a, const Pieces& pieces);
void attend_latents_f32(const Attention& a, const Pieces& pieces);

}  // namespace cadenza::cuda
