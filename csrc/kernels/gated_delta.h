// The gated delta net, a token at a time.
//
// The chunk-parallel form adds in an order that depends on where chunks begin. This one does not: a
// state's columns are independent of one another, so that tokens pass over a block of 16 columns,
// which stays in the first-level cache, in order; any cut of a prompt gives the same bits.
#pragma once

#include "core/kernel_table.h"
#include "kernels/math.h"
#include "kernels/norm.h"

namespace cadenza::CADENZA_ISA {

// Tokens whose outputs are held until their norm.
constexpr int64_t kDeltaTokens = 64;
constexpr float kUnitNormEps = 1e-6f;

// The channels of one head within a token's inputs.
struct ChannelRange {
  int64_t first, width;
  bool is_query, is_value;
};

inline ChannelRange channels_of(const GatedDeltaTask& task, int64_t head) {
  const int64_t value = head - 2 * task.key_heads;
  if (value >= 0) {
    return {2 * task.key_width() + value * task.value_size, task.value_size, false, true};
  }
  return {head * task.key_size, task.key_size, head < task.key_heads, false};
}

// The newest inputs of a range of channels as f32: a ring of `taps` rows by position in the row.
template <class T>
struct InputRing {
  float* inputs;  // [taps, width]
  int64_t taps, width;

  float* row(int64_t token) const { return inputs + (token + taps) % taps * width; }

  void read(int64_t token, const T* from) const {
    for (int64_t i = 0; i < width; i += kLanes) store(row(token) + i, Elem<T>::load(from + i));
  }
  void write(int64_t token, T* to) const {
    for (int64_t i = 0; i < width; i += kLanes) Elem<T>::store(to + i, load(row(token) + i));
  }
};

// y = silu(sum of the newest `taps` inputs by their weights, the oldest first).
template <class T>
inline void convolve_token(const GatedDeltaTask& task, const ChannelRange& range,
                           const InputRing<T>& ring, int64_t token, float* y) {
  for (int64_t i = 0; i < range.width; i += kLanes) {
    Vec sum = zero();
    for (int64_t tap = 0; tap < task.taps; tap++) {
      Vec weight = load(task.conv_weight + tap * task.channels() + range.first + i);
      sum = fma(load(ring.row(token - task.taps + 1 + tap) + i), weight, sum);
    }
    store(y + i, silu(sum));
  }
}

// Divides by the L2 norm, and a query by the root of its size.
inline void normalise_head(const ChannelRange& range, float* y) {
  float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(y, range.width) + kUnitNormEps);
  if (range.is_query) inverse *= 1.0f / __builtin_sqrtf(float(range.width));
  for (int64_t i = 0; i < range.width; i += kLanes) store(y + i, mul(load(y + i), set1(inverse)));
}

template <class T>
void convolve_head(const GatedDeltaTask& task, int64_t row, int64_t head, Arena& arena) {
  const ChannelRange range = channels_of(task, head);
  const int64_t channels = task.channels(), held = task.taps - 1;
  const StateRows& state = task.state;
  const InputRing<T> ring{arena.take<float>(task.taps * range.width), task.taps, range.width};
  T* pool = static_cast<T*>(task.conv_pool) + range.first;
  auto kept = [&](int32_t slot, int64_t i) {
    return pool + state.place(slot, held * channels) + i * channels;
  };
  const int32_t initial = state.initial[row];
  for (int64_t i = 0; i < held; i++) {
    if (initial >= 0) {
      ring.read(i - held, kept(initial, i));
    } else {
      for (int64_t j = 0; j < range.width; j += kLanes) store(ring.row(i - held) + j, zero());
    }
  }
  const int64_t begin = state.begin(row);
  for (int64_t token = begin; token < state.end(row); token++) {
    const T* x = static_cast<const T*>(task.x) + token * channels + range.first;
    float* y = task.mixed + token * channels + range.first;
    ring.read(token - begin, x);
    convolve_token(task, range, ring, token - begin, y);
    if (!range.is_value) normalise_head(range, y);
    const int32_t slot = state.kept[token];
    for (int64_t i = 0; slot >= 0 && i < held; i++) {
      ring.write(token - begin - held + 1 + i, kept(slot, i));
    }
  }
}

// A unit is a row and a head: of queries, of keys, or of values.
template <class T>
void convolve_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const GatedDeltaTask*>(context);
  const int64_t heads = 2 * task.key_heads + task.value_heads;
  for (int64_t unit = begin; unit < end; unit++) {
    convolve_head<T>(task, unit / heads, unit % heads, worker.arena);
  }
}


// How much of the state stays, and how strongly a token is written, of each token of a range.
struct DeltaRates {
  float decay[kDeltaTokens], strength[kDeltaTokens];
};

inline void find_rates(const GatedDeltaTask& task, int64_t head, int64_t first, int64_t tokens,
                       DeltaRates& rates) {
  for (int64_t i = 0; i < tokens; i++) {
    const float* of_token = task.rates + (first + i) * 2 * task.value_heads + head;
    rates.decay[i] = of_token[0] + task.decay_bias[head];
    rates.strength[i] = of_token[task.value_heads];
  }
  for (int64_t i = 0; i < tokens; i += kLanes) {
    int n = int(tokens - i < kLanes ? tokens - i : kLanes);
    Vec decay = exp_vec(mul(softplus(load_n(rates.decay + i, n)), set1(task.decay[head])));
    store_n(rates.decay + i, decay, n);
    store_n(rates.strength + i, sigmoid(load_n(rates.strength + i, n)), n);
  }
}

// Four sums of every fourth key, added in a fixed tree.
struct KeySums {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  Vec total() const { return add(add(sums[0], sums[1]), add(sums[2], sums[3])); }
};

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
      : task_(task), row_(row), head_(head) {
    const int64_t block = task.key_size * kLanes;
    outputs_ = arena.take<float>(kDeltaTokens * task.value_size);
    const int32_t last = task.state.kept[task.state.end(row) - 1];
    work_ = last >= 0 ? slot(last) : arena.take<float>(task.head_state());
    zeros_ = arena.take<float>(block);
    for (int64_t i = 0; i < block; i += kLanes) store(zeros_ + i, zero());
  }

  void run() {
    const int64_t begin = task_.state.begin(row_), end = task_.state.end(row_);
    for (int64_t first = begin; first < end; first += kDeltaTokens) {
      const int64_t tokens = end - first < kDeltaTokens ? end - first : kDeltaTokens;
      find_rates(task_, head_, first, tokens, rates_);
      for (int64_t column = 0; column < task_.value_size; column += kLanes) {
        pass(first, tokens, column, first == begin);
      }
      for (int64_t i = 0; i < tokens; i++) finish(first + i, outputs_ + i * task_.value_size);
    }
  }

 private:
  float* slot(int32_t index) const {
    const int64_t layer = task_.value_heads * task_.head_state();
    return task_.state_pool + task_.state.place(index, layer) + head_ * task_.head_state();
  }

  const float* mixed(int64_t token, int64_t channel) const {
    return task_.mixed + token * task_.channels() + channel;
  }

  // Passes tokens over the columns from `column` on.
  void pass(int64_t first, int64_t tokens, int64_t column, bool is_start) {
    const int64_t key_size = task_.key_size, at = column * key_size;
    const int64_t query = task_.key_head(head_) * key_size;
    const int64_t key = task_.key_width() + query;
    const int64_t value = 2 * task_.key_width() + head_ * task_.value_size + column;
    const int32_t initial = task_.state.initial[row_];
    const float* from = !is_start ? work_ + at : (initial >= 0 ? slot(initial) + at : zeros_);
    Vec read = read_columns(from, mixed(first, key), key_size);
    for (int64_t i = 0; i < tokens; i++) {
      const int64_t token = first + i;
      const float* own = mixed(token, key);
      const DeltaStep step{mixed(token, query), own,
                           i + 1 < tokens ? mixed(token + 1, key) : own,
                           load(mixed(token, value)), rates_.decay[i], rates_.strength[i]};
      Vec out = step_columns(step, from, work_ + at, key_size, read);
      store(outputs_ + i * task_.value_size + column, out);
      from = work_ + at;
      const int32_t kept = task_.state.kept[token];
      if (kept >= 0 && slot(kept) != work_) copy_columns(from, slot(kept) + at);
    }
  }

  void copy_columns(const float* from, float* to) const {
    for (int64_t i = 0; i < task_.key_size * kLanes; i += kLanes) store(to + i, load(from + i));
  }

  // The gated norm of a token's output.
  void finish(int64_t token, const float* y) const {
    const int64_t width = task_.value_size;
    const int64_t at = (token * task_.value_heads + head_) * width;
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
  float* outputs_;  // [kDeltaTokens, value size]
  float* work_;     // the state behind the newest token: where the last one is kept, or scratch
  float* zeros_;    // [key size, 16]
  DeltaRates rates_;
};

// A unit is a row and a value head.
template <class T>
void gated_delta_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const GatedDeltaTask*>(context);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / task.value_heads, head = unit % task.value_heads;
    if (task.state.begin(row) == task.state.end(row)) continue;
    DeltaHead<T>(task, row, head, worker.arena).run();
  }
}

}  // namespace cadenza::CADENZA_ISA
