// What the kernels that choose tokens share: a step's logit rows, keys that order candidates, and
// reductions over a block whose results no order of threads can change.
//
// Masses and units of distances are summed as integers, 2^40 of which are 1: such sums are exact, so
// that neither the number of threads nor the way in which a vocabulary is divided shows in a result.
#pragma once

#include "core/logit_rows.h"
#include "cuda/device.h"
#include "cuda/math.h"

namespace cadenza::cuda {

// Tokens of a slice of the vocabulary, which is a block's part of a row.
constexpr int kSlice = 2048;
constexpr unsigned kSliceThreads = 256;
constexpr int kPerThread = kSlice / int(kSliceThreads);
// Of a block that has a whole row.
constexpr unsigned kRowThreads = 512;

constexpr float kLowest = -3.40282347e38f;  // below all finite logits: candidates are not below it
constexpr uint32_t kInfiniteBits = 0x7f800000u;

// What a slice finds of its row.
struct SlicePart {
  uint64_t best;         // the largest key of what the row's token is chosen by; 0: no candidate
  uint64_t exponentials; // the sum of e^(logit - the slice's largest), in units of 2^-40
  uint32_t largest_bits; // largest |logit| as bits: at least kInfiniteBits if any is not finite
};

// Records of token rules, and the token history that they look back to; without records if no row has rules.
struct RuleMemory {
  const int32_t* records;  // [num_records, record_words]
  const int32_t* page_table;
  const int32_t* history;
  int num_records, record_words, rows, pages, page_size, history_pages;
};

struct Sampling {
  const int32_t* columns;  // [kNumLogitColumns, stride]
  const int32_t* count;
  int stride, first;  // the row of the columns that is the first of the arrays below
  int vocab, slices;
  int64_t pitch;      // elements of a row of logits, some of them behind the vocabulary
  float* logits;      // [rows, pitch]
  float* choices;     // [rows, pitch]: of rows with filters, what is drawn from
  SlicePart* parts;   // [rows, slices]
  uint64_t* tops;     // [rows, slices, kTopLogprobs]: of rows with logprobs, the largest keys
  LogitTransform transform;
  RuleMemory rules;
  int banned;         // a token that no row chooses; kNoToken: there is none
  bool has_row_keys;  // a fault: draws depend on the row's place in the batch
  int32_t* out;       // [rows, kSampleColumns]
};

// A logit row's settings, of a row of the arrays.
struct Settings {
  float temperature, top_p, min_p, top_n_sigma;
  int top_k, num_logprobs, target;
  uint32_t key[2];
  const int32_t* record;  // of its rules; null: none
  int row, length;        // of the page table, and the tokens before the one that is chosen
  bool is_valid;

  __device__ bool has_logprobs() const { return num_logprobs >= 0; }
  __device__ bool chooses() const { return target < 0; }
  __device__ bool draws() const { return chooses() && temperature > 0.0f; }
  __device__ bool filters() const {
    return draws() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f || top_n_sigma > 0.0f);
  }
};

__device__ __forceinline__ Settings settings_of(const Sampling& task, int row) {
  const int index = task.first + row;
  auto word = [&](LogitColumn column) { return task.columns[int64_t(column) * task.stride + index]; };
  auto number = [&](LogitColumn column) { return as_bits<float>(word(column)); };
  Settings found{};
  found.temperature = number(kTemperature);
  found.top_p = number(kTopP);
  found.min_p = number(kMinP);
  found.top_n_sigma = number(kTopNSigma);
  found.top_k = word(kTopK);
  found.num_logprobs = word(kNumLogprobs);
  found.target = word(kTarget);
  found.key[0] = task.has_row_keys ? uint32_t(index) : uint32_t(word(kKeyLow));
  found.key[1] = uint32_t(word(kKeyHigh));
  found.row = word(kRow);
  found.length = word(kPosition);
  found.is_valid = found.target < task.vocab;
  const int record = word(kRuleRecord);
  if (task.rules.num_records == 0 || record < 0 || !found.chooses()) return found;
  const RuleMemory& rules = task.rules;
  found.is_valid = found.is_valid && record < rules.num_records && found.row >= 0 &&
                   found.row < rules.rows && found.length >= 0 &&
                   found.length <= int64_t(rules.pages) * rules.page_size;
  if (found.is_valid) found.record = rules.records + int64_t(record) * rules.record_words;
  return found;
}

// The order of floats as that of unsigned integers.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t raw = as_bits<uint32_t>(x);
  return raw >> 31 ? ~raw : raw | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
  return as_bits<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Orders candidates by value, equal ones (0 and -0, too) by id, the lowest first; 0 is none.
__device__ __forceinline__ uint64_t key_of(float value, int id) {
  if (!(value >= kLowest)) return 0;
  return uint64_t(ordered_bits(value + 0.0f)) << 32 | (0xffffffffu - uint32_t(id));
}
__device__ __forceinline__ int id_of(uint64_t key) {
  return key == 0 ? 0 : int(0xffffffffu - uint32_t(key));
}
__device__ __forceinline__ float value_of(uint64_t key) {
  return key == 0 ? as_bits<float>(0xff800000u) : from_ordered(uint32_t(key >> 32));
}

// A number of at most 1 in units of 2^-40.
__device__ __forceinline__ uint64_t in_units(float x) {
  return x > 0.0f ? uint64_t((x < 1.0f ? x : 1.0f) * 0x1p40f) : 0;
}

struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Smaller {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Merges a value of each thread of a block by an operation whose order is free; every thread gets it.
// `partials` is shared memory for one value a warp.
template <class Merge, class T>
__device__ __forceinline__ T block_merge(T value, T* partials) {
  const Merge merge;
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = merge(value, warp_shuffle_xor(value, mask));
  if (threadIdx.x % kWarp == 0) partials[threadIdx.x / kWarp] = value;
  __syncthreads();
  T all = partials[0];
  for (int warp = 1; warp < int(blockDim.x) / kWarp; warp++) all = merge(all, partials[warp]);
  __syncthreads();
  return all;
}

// Uniform random bits of a token, from the row's draw key.
__device__ __forceinline__ uint32_t hash_token(uint32_t token, const uint32_t (&key)[2]) {
  uint32_t x = token * 0x9E3779B9u ^ key[0];
  x = (x ^ x >> 17) * 0xed5ad4bbu;
  x = ((x ^ x >> 11) + key[1]) * 0xac4c1b51u;
  x = (x ^ x >> 15) * 0x31848babu;
  return x ^ x >> 14;
}

// -log(-log1p(-u)), u = min((bits + 0.5) 2^-32, 1 - 2^-24).
__device__ __forceinline__ float gumbel_noise(uint32_t random) {
  const float u = at_most((float(random) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return 0.0f - log_of(0.0f - log1p_neg(u));
}

// The key of a token by its value with the row's noise.
__device__ __forceinline__ uint64_t drawn_key(float value, int id, const Settings& settings) {
  if (!(value >= kLowest)) return 0;
  return key_of(value + gumbel_noise(hash_token(uint32_t(id), settings.key)), id);
}

}  // namespace cadenza::cuda
