// The gated delta net, a token at a time.
//
// The chunk-parallel form adds in an order that depends on where chunks begin. This one does not: a
// state's columns are independent of one another, so that tokens pass over a block of 16 columns,
// which stays in the first-level cache, in order; any cut of a prompt gives the same bits.
#pragma once

#include "kernels/convolution.h"
#include "kernels/head_state.h"
#include "kernels/norm.h"

namespace cadenza::CADENZA_ISA {

constexpr float kUnitNormEps = 1e-6f;

// The channels of one head of queries, keys or values.
template <class T>
struct DeltaChannels {
  static constexpr bool kHasSilu = true;
  const GatedDeltaTask& task;
  int64_t first, width;
  bool is_query, is_value;

  const T* inputs(int64_t token, T*) const {
    return static_cast<const T*>(task.x) + token * task.conv.channels + first;
  }
  float* results(int64_t token) const { return task.mixed + token * task.conv.channels + first; }

  // Divides by the L2 norm, and a query by the root of its size.
  void finish(int64_t, float* y) const {
    if (is_value) return;
    float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(y, width) + kUnitNormEps);
    if (is_query) inverse *= 1.0f / __builtin_sqrtf(float(width));
    for (int64_t i = 0; i < width; i += kLanes) store(y + i, mul(load(y + i), set1(inverse)));
  }
};

template <class T>
DeltaChannels<T> channels_of(const GatedDeltaTask& task, int64_t head) {
  const int64_t value = head - 2 * task.key_heads, keys = task.matrices.keys;
  if (value >= 0) {
    const int64_t first = 2 * task.key_width() + value * task.matrices.values;
    return {task, first, task.matrices.values, false, true};
  }
  return {task, head * keys, keys, head < task.key_heads, false};
}

// A unit is a row and a head: of queries, of keys, or of values.
template <class T>
void delta_convolve_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const GatedDeltaTask*>(context);
  const int64_t heads = 2 * task.key_heads + task.matrices.heads;
  for (int64_t unit = begin; unit < end; unit++) {
    convolve<T>(task.conv, unit / heads, channels_of<T>(task, unit % heads), worker.arena);
  }
}

// How much of the state stays, and how strongly a token is written, of each token of a range.
struct DeltaRates {
  float decay[kStateTokens], strength[kStateTokens];
};

inline void find_rates(const GatedDeltaTask& task, int64_t head, int64_t first, int64_t tokens,
                       DeltaRates& rates) {
  for (int64_t i = 0; i < tokens; i++) {
    const float* of_token = task.rates + (first + i) * 2 * task.matrices.heads + head;
    rates.decay[i] = of_token[0] + task.decay_bias[head];
    rates.strength[i] = of_token[task.matrices.heads];
  }
  for (int64_t i = 0; i < tokens; i += kLanes) {
    int n = int(tokens - i < kLanes ? tokens - i : kLanes);
    Vec decay = exp_vec(mul(softplus(load_n(rates.decay + i, n)), set1(task.decay[head])));
    store_n(rates.decay + i, decay, n);
    store_n(rates.strength + i, sigmoid(load_n(rates.strength + i, n)), n);
  }
}

// The product of a key with 16 columns of the state, [key size, 16].
inline Vec read_columns(const float* state, const float* key, int64_t key_size) {
  KeySums read;
  for (int64_t i = 0; i < key_size; i += 4) {
    for (int j = 0; j < 4; j++) {
      read.sums[j] = fma(load(state + (i + j) * kLanes), set1(key[i + j]), read.sums[j]);
    }
  }
  return read.total();
}

// What one token does to 16 columns.
struct DeltaStep {
  const float* query;
  const float* key;
  const float* next_key;  // the next token's; the last one's own
  Vec value;              // [16]
  float decay, strength;
};

// Writes the state behind the token to `to`, which may be `from`. `read` is the product of its key
// with the state before, and becomes that of the next key with the state behind. Returns the output.
inline Vec step_columns(const DeltaStep& step, const float* from, float* to, int64_t key_size,
                        Vec& read) {
  const Vec decay = set1(step.decay);
  const Vec change = mul(sub(step.value, mul(decay, read)), set1(step.strength));
  KeySums out, next;
  for (int64_t i = 0; i < key_size; i += 4) {
    for (int j = 0; j < 4; j++) {
      Vec old = mul(decay, load(from + (i + j) * kLanes));
      Vec state = fma(set1(step.key[i + j]), change, old);
      store(to + (i + j) * kLanes, state);
      out.sums[j] = fma(state, set1(step.query[i + j]), out.sums[j]);
      next.sums[j] = fma(state, set1(step.next_key[i + j]), next.sums[j]);
    }
  }
  read = next.total();
  return out.total();
}

// The gated delta rule of one row and one value head.
template <class T>
class DeltaHead {
 public:
  DeltaHead(const GatedDeltaTask& task, int64_t row, int64_t head, Arena& arena)
      : task_(task), row_(row), head_(head), state_(task.conv.state, task.matrices, row, head, arena) {
    outputs_ = arena.take<float>(kStateTokens * task.matrices.values);
  }

  void run() {
    const int64_t begin = task_.conv.state.begin(row_), end = task_.conv.state.end(row_);
    const int64_t values = task_.matrices.values;
    for (int64_t first = begin; first < end; first += kStateTokens) {
      const int64_t tokens = end - first < kStateTokens ? end - first : kStateTokens;
      find_rates(task_, head_, first, tokens, rates_);
      for (int64_t column = 0; column < values; column += kLanes) {
        pass(first, tokens, column, first == begin);
      }
      for (int64_t i = 0; i < tokens; i++) finish(first + i, outputs_ + i * values);
    }
  }

 private:
  const float* mixed(int64_t token, int64_t channel) const {
    return task_.mixed + token * task_.conv.channels + channel;
  }

  // Passes tokens over the columns from `column` on.
  void pass(int64_t first, int64_t tokens, int64_t column, bool is_start) {
    const StateMatrices& matrices = task_.matrices;
    const int64_t keys = matrices.keys;
    const int64_t query = task_.key_head(head_) * keys;
    const int64_t key = task_.key_width() + query;
    const int64_t value = 2 * task_.key_width() + head_ * matrices.values + column;
    const float* from = state_.before(column, is_start);
    Vec read = read_columns(from, mixed(first, key), keys);
    for (int64_t i = 0; i < tokens; i++) {
      const int64_t token = first + i;
      const float* own = mixed(token, key);
      const DeltaStep step{mixed(token, query), own,
                           i + 1 < tokens ? mixed(token + 1, key) : own,
                           load(mixed(token, value)), rates_.decay[i], rates_.strength[i]};
      Vec out = step_columns(step, from, state_.newest(column), keys, read);
      store(outputs_ + i * matrices.values + column, out);
      from = state_.newest(column);
      state_.keep(token, column);
    }
  }

  // The gated norm of a token's output.
  void finish(int64_t token, const float* y) const {
    const int64_t width = task_.matrices.values;
    const int64_t at = (token * task_.matrices.heads + head_) * width;
    const T* gate = static_cast<const T*>(task_.gate) + at;
    const Vec scale = set1(inverse_rms(y, width, task_.norm_eps));
    for (int64_t i = 0; i < width; i += kLanes) {
      Vec normed = mul(mul(load(y + i), scale), load(task_.norm_weight + i));
      Elem<T>::store(static_cast<T*>(task_.out) + at + i,
                     mul(normed, silu(Elem<T>::load(gate + i))));
    }
  }

  const GatedDeltaTask& task_;
  const int64_t row_, head_;
  HeadState state_;
  float* outputs_;  // [kStateTokens, values]
  DeltaRates rates_;
};

// A unit is a row and a value head.
template <class T>
void gated_delta_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const GatedDeltaTask*>(context);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / task.matrices.heads, head = unit % task.matrices.heads;
    if (task.conv.state.begin(row) == task.conv.state.end(row)) continue;
    DeltaHead<T>(task, row, head, worker.arena).run();
  }
}

}  // namespace cadenza::CADENZA_ISA
