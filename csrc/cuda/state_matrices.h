// The matrices of keys by values that are a layer's state, a token at a time.
//
// A column of a matrix is independent of the others. Four groups of lanes hold its keys in registers
// from the first to the last token of a row, each every fourth quad of keys, and warps have eight
// columns; so a token costs no memory but its own inputs, which come to shared memory some tokens ahead.
// The order of a column's sums follows from the number of keys: any cut of a prompt gives the same bits.
#pragma once

#include "cuda/math.h"
#include "cuda/state_rows.h"

namespace cadenza::cuda {

constexpr int kKeyGroups = 4;
constexpr int kColumnsPerWarp = kWarp / kKeyGroups;
// Columns of a block.
constexpr int kColumns = 32;
// Tokens whose inputs are in shared memory at the same time; those of the next ones are on their way.
constexpr int kTokensAhead = 16;
// Columns side by side in a pool.
constexpr int kPoolColumns = 16;
// Keys of a matrix at most.
constexpr int kMostKeys = 256;

// Channels of a token: queries, keys and values as the convolution leaves them. Head h has keys and
// queries of head h / heads_a_key, or, tiled, h % key_heads.
struct MatrixTask {
  SlotRows slots;
  float* pool;  // [slots, layers, heads, values / 16, keys, 16]
  int heads, keys, values, key_heads;
  bool tiled;
  int channels, first_query, first_key, first_value;
  const float* mixed;    // [tokens, channels]
  const float* rates;    // [tokens, 2, heads]: what stays of the state, and how strongly a token is written
  const float* skip;     // [heads]: times the values, added to the outputs; or null
  float* outputs;        // [tokens, heads, values]

  __device__ int key_head(int head) const { return tiled ? head % key_heads : head / (heads / key_heads); }
};

// The inputs of some tokens, for one head and a block's columns. K keys, those behind the head's zero.
template <int K>
struct TokenInputs {
  float keys[kTokensAhead][K];
  float queries[kTokensAhead][K];
  float values[kTokensAhead][kColumns];
  float rates[2][kTokensAhead];
  int kept[kTokensAhead];
};

template <int K>
__device__ __forceinline__ void stage(const MatrixTask& task, int head, int column, int first, int tokens,
                                      TokenInputs<K>& to) {
  constexpr int kQuads = (2 * K + kColumns) / 4;
  const int key = task.key_head(head) * task.keys;
  for (int i = int(threadIdx.x); i < tokens * kQuads; i += int(blockDim.x)) {
    const int token = i / kQuads, at = i % kQuads * 4;
    const float* from = task.mixed + int64_t(first + token) * task.channels;
    if (at < K) {
      copy_async(&to.keys[token][at], from + task.first_key + key + at, at < task.keys);
    } else if (at < 2 * K) {
      copy_async(&to.queries[token][at - K], from + task.first_query + key + at - K, at - K < task.keys);
    } else {
      const int value = column + at - 2 * K;
      copy_async(&to.values[token][at - 2 * K], from + task.first_value + head * task.values + value,
                 value < task.values);
    }
  }
  copy_commit();
}

// A token's rate or slot, which a thread reads ahead.
struct Ahead {
  float rate = 0.0f;
  int kept = -1;
};

template <int K>
class MatrixColumn {
 public:
  static constexpr int kQuads = K / (4 * kKeyGroups);

  __device__ MatrixColumn(const MatrixTask& task, int head, int column)
      : task_(task), head_(head), column_(column), group_(int(threadIdx.x) % kWarp / kColumnsPerWarp) {}

  __device__ bool is_there() const { return column_ < task_.values; }

  __device__ void load(int slot) {
    const float* from = slot < 0 ? nullptr : place(slot);
    for (int i = 0; i < kQuads; i++) {
      for (int j = 0; j < 4; j++) {
        const int key = quad(i) * 4 + j;
        state_[i][j] = from != nullptr && key < task_.keys ? from[key * kPoolColumns] : 0.0f;
      }
    }
  }
  __device__ void store(int slot) const {
    float* to = place(slot);
    for (int i = 0; i < kQuads; i++) {
      for (int j = 0; j < 4; j++) {
        const int key = quad(i) * 4 + j;
        if (key < task_.keys) to[key * kPoolColumns] = state_[i][j];
      }
    }
  }

  // The product of a key with the column.
  __device__ float read(const float* key) const {
    float sums[4] = {};
    for (int i = 0; i < kQuads; i++) {
      const float4 k = *reinterpret_cast<const float4*>(key + quad(i) * 4);
      sums[0] = fmaf(state_[i][0], k.x, sums[0]);
      sums[1] = fmaf(state_[i][1], k.y, sums[1]);
      sums[2] = fmaf(state_[i][2], k.z, sums[2]);
      sums[3] = fmaf(state_[i][3], k.w, sums[3]);
    }
    return total(sums);
  }

  // The state decays and a key is written by `change`; returns the product with a query.
  __device__ float step(const float* key, const float* query, float decay, float change) {
    float sums[4] = {};
    for (int i = 0; i < kQuads; i++) {
      const float4 k4 = *reinterpret_cast<const float4*>(key + quad(i) * 4);
      const float4 q4 = *reinterpret_cast<const float4*>(query + quad(i) * 4);
      const float k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
      for (int j = 0; j < 4; j++) {
        state_[i][j] = fmaf(k[j], change, decay * state_[i][j]);
        sums[j] = fmaf(state_[i][j], q[j], sums[j]);
      }
    }
    return total(sums);
  }

  __device__ void write(int token, float y) const {
    if (group_ == 0) task_.outputs[(int64_t(token) * task_.heads + head_) * task_.values + column_] = y;
  }

 private:
  __device__ int quad(int i) const { return i * kKeyGroups + group_; }
  __device__ float* place(int slot) const {
    const int64_t matrix = int64_t(task_.keys) * task_.values;
    return task_.pool + task_.slots.place(slot, task_.heads * matrix) + head_ * matrix +
           int64_t(column_ / kPoolColumns) * task_.keys * kPoolColumns + column_ % kPoolColumns;
  }
  __device__ float total(const float (&sums)[4]) const {
    float all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    all += warp_shuffle_xor(all, kColumnsPerWarp);
    all += warp_shuffle_xor(all, 2 * kColumnsPerWarp);
    return all;
  }

  const MatrixTask& task_;
  const int head_, column_, group_;
  float state_[kQuads][4];
};

// The gated delta rule: what a token writes is the difference from what its key reads, by its strength.
struct DeltaRule {
  template <int K>
  static __device__ __forceinline__ float change(const MatrixColumn<K>& column, const float* key, float value,
                                                 float decay, float strength) {
    return (value - decay * column.read(key)) * strength;
  }
};

// The selective scan: a token writes its values by their rate.
struct ScanRule {
  template <int K>
  static __device__ __forceinline__ float change(const MatrixColumn<K>&, const float*, float value, float,
                                                 float rate) {
    return value * rate;
  }
};

__device__ __forceinline__ Ahead read_ahead(const MatrixTask& task, int head, int first, int tokens) {
  Ahead found;
  const int token = int(threadIdx.x) % kTokensAhead, which = int(threadIdx.x) / kTokensAhead;
  if (token >= tokens) return found;
  if (which < 2) found.rate = task.rates[(int64_t(first + token) * 2 + which) * task.heads + head];
  if (which == 0) found.kept = task.slots.slot(task.slots.kept[first + token]);
  return found;
}

template <int K>
__device__ __forceinline__ void put(const Ahead& ahead, TokenInputs<K>& to) {
  const int token = int(threadIdx.x) % kTokensAhead, which = int(threadIdx.x) / kTokensAhead;
  if (which < 2) to.rates[which][token] = ahead.rate;
  if (which == 0) to.kept[token] = ahead.kept;
}

// A block for each row with tokens, head, and range of columns.
template <class Rule, int K>
__global__ void __launch_bounds__(kColumns* kKeyGroups) matrix_kernel(const MatrixTask task) {
  const RowTokens row = nth_row(task.slots, int(blockIdx.x));
  if (row.row < 0) return;
  auto* inputs = shared_memory<TokenInputs<K>>();
  const int head = int(blockIdx.z), first_column = int(blockIdx.y) * kColumns;
  const int own = int(threadIdx.x) / kWarp * kColumnsPerWarp + int(threadIdx.x) % kColumnsPerWarp;
  MatrixColumn<K> column(task, head, first_column + own);
  const float skip = task.skip == nullptr ? 0.0f : task.skip[head];
  auto tokens_from = [&](int first) { return min(kTokensAhead, row.end - first); };
  put(read_ahead(task, head, row.begin, tokens_from(row.begin)), inputs[0]);
  stage(task, head, first_column, row.begin, tokens_from(row.begin), inputs[0]);
  if (column.is_there()) column.load(task.slots.slot(task.slots.initial[row.row]));
  for (int first = row.begin, which = 0; first < row.end; first += kTokensAhead, which ^= 1) {
    const int next = first + kTokensAhead, num_next = max(0, tokens_from(next));
    stage(task, head, first_column, next, num_next, inputs[which ^ 1]);
    const Ahead ahead = read_ahead(task, head, next, num_next);
    copy_wait<1>();
    __syncthreads();
    const TokenInputs<K>& now = inputs[which];
    for (int i = 0; i < tokens_from(first) && column.is_there(); i++) {
      const float decay = now.rates[0][i], value = now.values[i][own];
      const float change = Rule::template change<K>(column, now.keys[i], value, decay, now.rates[1][i]);
      column.write(first + i, fmaf(skip, value, column.step(now.keys[i], now.queries[i], decay, change)));
      if (now.kept[i] >= 0) column.store(now.kept[i]);
    }
    put(ahead, inputs[which ^ 1]);
    __syncthreads();
  }
  copy_wait<0>();
}

template <class Rule, int K>
void launch_matrices(const MatrixTask& task) {
  const int64_t rows = std::min(task.slots.rows, task.slots.tokens);
  const int columns = std::min(task.values, kColumns);
  launch(matrix_kernel<Rule, K>,
         dim3{unsigned(rows), unsigned(ceil_div(task.values, int64_t(kColumns))), unsigned(task.heads)},
         unsigned(columns * kKeyGroups), 2 * sizeof(TokenInputs<K>), task);
}

// Runs tokens over the matrices of all rows and heads. keys is a multiple of 16, at most kMostKeys.
template <class Rule>
void run_matrices(const MatrixTask& task) {
  if (task.keys <= 32) return launch_matrices<Rule, 32>(task);
  if (task.keys <= 64) return launch_matrices<Rule, 64>(task);
  if (task.keys <= 128) return launch_matrices<Rule, 128>(task);
  launch_matrices<Rule, kMostKeys>(task);
}

}  // namespace cadenza::cuda
