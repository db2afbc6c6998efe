// The selective scan of Mamba-2, a token at a time.
#pragma once

#include "kernels/convolution.h"
#include "kernels/head_state.h"
#include "kernels/norm.h"

namespace cadenza::CADENZA_ISA {

template <class T>
struct ScanChannels {
  static constexpr bool kHasSilu = true;
  const SelectiveScanTask& task;
  int64_t first, width;

  const T* inputs(int64_t token, T*) const {
    return static_cast<const T*>(task.x) + token * task.conv.channels + first;
  }
  float* results(int64_t token) const { return task.mixed + token * task.conv.channels + first; }
  void finish(int64_t, const float*) const {}
};

// A unit is a row and `kConvChannels` channels.
template <class T>
void scan_convolve_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const SelectiveScanTask*>(context);
  const int64_t channels = task.conv.channels, ranges = ceil_div(channels, kConvChannels);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit % ranges * kConvChannels, left = channels - first;
    const int64_t width = left < kConvChannels ? left : kConvChannels;
    convolve<T>(task.conv, unit / ranges, ScanChannels<T>{task, first, width}, worker.arena);
  }
}

// How much of the state stays, and by how much a token's values are written, of each of some tokens.
struct ScanRates {
  float decay[kStateTokens], rate[kStateTokens];
};

inline void find_rates(const SelectiveScanTask& task, int64_t head, int64_t first, int64_t tokens,
                       ScanRates& rates) {
  for (int64_t i = 0; i < tokens; i++) {
    rates.rate[i] = task.rates[(first + i) * task.matrices.heads + head] + task.rate_bias[head];
  }
  for (int64_t i = 0; i < tokens; i += kLanes) {
    int n = int(tokens - i < kLanes ? tokens - i : kLanes);
    Vec rate = softplus(load_n(rates.rate + i, n));
    store_n(rates.rate + i, rate, n);
    store_n(rates.decay + i, exp_vec(mul(rate, set1(task.decay[head]))), n);
  }
}

// What one token does to 16 columns.
struct ScanStep {
  const float* key;
  const float* query;
  Vec written;  // [16]: the values times the rate
  float decay;
};

// Writes the state behind the token to `to`, which may be `from`; returns its product with the query.
inline Vec step_columns(const ScanStep& step, const float* from, float* to, int64_t keys) {
  const Vec decay = set1(step.decay);
  KeySums out;
  for (int64_t i = 0; i < keys; i += 4) {
    for (int j = 0; j < 4; j++) {
      Vec old = mul(decay, load(from + (i + j) * kLanes));
      Vec state = fma(set1(step.key[i + j]), step.written, old);
      store(to + (i + j) * kLanes, state);
      out.sums[j] = fma(state, set1(step.query[i + j]), out.sums[j]);
    }
  }
  return out.total();
}

// The scan of one row and one head.
template <class T>
class ScanHead {
 public:
  ScanHead(const SelectiveScanTask& task, int64_t row, int64_t head, Arena& arena)
      : task_(task), row_(row), head_(head), state_(task.conv.state, task.matrices, row, head, arena) {}

  void run() {
    const int64_t begin = task_.conv.state.begin(row_), end = task_.conv.state.end(row_);
    for (int64_t first = begin; first < end; first += kStateTokens) {
      const int64_t tokens = end - first < kStateTokens ? end - first : kStateTokens;
      find_rates(task_, head_, first, tokens, rates_);
      for (int64_t column = 0; column < task_.matrices.values; column += kLanes) {
        pass(first, tokens, column, first == begin);
      }
    }
  }

 private:
  // Passes tokens over the columns from `column` on, and gates their outputs.
  void pass(int64_t first, int64_t tokens, int64_t column, bool is_start) {
    const StateMatrices& matrices = task_.matrices;
    const int64_t keys = matrices.keys, value = head_ * matrices.values + column;
    const int64_t key = matrices.width() + head_ / (matrices.heads / task_.groups) * keys;
    const int64_t query = key + task_.groups * keys;
    const Vec skip = set1(task_.skip[head_]);
    const float* from = state_.before(column, is_start);
    for (int64_t i = 0; i < tokens; i++) {
      const int64_t token = first + i, at = token * matrices.width() + value;
      const float* mixed = task_.mixed + token * task_.conv.channels;
      const Vec x = load(mixed + value);
      const ScanStep step{mixed + key, mixed + query, mul(x, set1(rates_.rate[i])), rates_.decay[i]};
      Vec y = fma(skip, x, step_columns(step, from, state_.newest(column), keys));
      Vec gate = silu(Elem<T>::load(static_cast<const T*>(task_.gate) + at));
      store(task_.gated + at, mul(y, gate));
      from = state_.newest(column);
      state_.keep(token, column);
    }
  }

  const SelectiveScanTask& task_;
  const int64_t row_, head_;
  HeadState state_;
  ScanRates rates_;
};

// A unit is a row and a head.
template <class T>
void selective_scan_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const SelectiveScanTask*>(context);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / task.matrices.heads, head = unit % task.matrices.heads;
    if (task.conv.state.begin(row) == task.conv.state.end(row)) continue;
    ScanHead<T>(task, row, head, worker.arena).run();
  }
}

// The RMS norm of each group of a token's gated outputs. A unit is a token.
template <class T>
void scan_norm_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const SelectiveScanTask*>(context);
  const int64_t width = task.matrices.width(), group = width / task.groups;
  for (int64_t token = begin; token < end; token++) {
    for (int64_t first = 0; first < width; first += group) {
      const float* y = task.gated + token * width + first;
      T* out = static_cast<T*>(task.out) + token * width + first;
      const Vec scale = set1(inverse_rms(y, group, task.norm_eps));
      for (int64_t i = 0; i < group; i += kLanes) {
        Vec normed = mul(mul(load(y + i), scale), load(task.norm_weight + first + i));
        Elem<T>::store(out + i, normed);
      }
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
