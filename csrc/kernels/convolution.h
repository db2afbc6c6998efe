// The causal depthwise convolution of layers with a state, a token at a time; and the one of LFM2.
#pragma once

#include "core/kernel_table.h"
#include "kernels/math.h"

namespace cadenza::CADENZA_ISA {

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
  void clear(int64_t token) const {
    for (int64_t i = 0; i < width; i += kLanes) store(row(token) + i, zero());
  }
};

// The sum of the newest `taps` inputs of channels from `first` on by their weights, the oldest first,
// on top of the bias.
template <bool kHasSilu, class T>
inline void convolve_token(const Convolution& conv, int64_t first, const InputRing<T>& ring,
                           int64_t token, float* y) {
  for (int64_t i = 0; i < ring.width; i += kLanes) {
    Vec sum = conv.bias == nullptr ? zero() : load(conv.bias + first + i);
    for (int64_t tap = 0; tap < conv.taps; tap++) {
      Vec weight = load(conv.weight + tap * conv.channels + first + i);
      sum = fma(load(ring.row(token - conv.taps + 1 + tap) + i), weight, sum);
    }
    store(y + i, kHasSilu ? silu(sum) : sum);
  }
}

// Convolves a range of channels of a row. `Channels` has `first` and `width`, multiples of 16, and says
// where a token's inputs are (`inputs`, which may use scratch of its own), where its results go
// (`results`), whether SiLU follows (`kHasSilu`), and what else does (`finish`).
template <class T, class Channels>
void convolve(const Convolution& conv, int64_t row, const Channels& channels, Arena& arena) {
  const int64_t width = channels.width, held = conv.taps - 1;
  const StateRows& state = conv.state;
  const InputRing<T> ring{arena.take<float>(conv.taps * width), conv.taps, width};
  T* scratch = arena.take<T>(width);
  T* pool = static_cast<T*>(conv.pool) + channels.first;
  auto kept = [&](int32_t slot, int64_t i) {
    return pool + state.place(slot, held * conv.channels) + i * conv.channels;
  };
  const int32_t initial = state.initial[row];
  for (int64_t i = 0; i < held; i++) {
    if (initial >= 0) {
      ring.read(i - held, kept(initial, i));
    } else {
      ring.clear(i - held);
    }
  }
  const int64_t begin = state.begin(row);
  for (int64_t token = begin; token < state.end(row); token++) {
    float* y = channels.results(token);
    ring.read(token - begin, channels.inputs(token, scratch));
    convolve_token<Channels::kHasSilu>(conv, channels.first, ring, token - begin, y);
    channels.finish(token, y);
    const int32_t slot = state.kept[token];
    for (int64_t i = 0; slot >= 0 && i < held; i++) {
      ring.write(token - begin - held + 1 + i, kept(slot, i));
    }
  }
}

// A range of channels of a gated short convolution.
template <class T>
struct ShortConvChannels {
  static constexpr bool kHasSilu = false;
  const ShortConvTask& task;
  int64_t first, width;
  float* sums;  // [width]

  // Of part 0, 1 or 2 of a token's input: B, C or x.
  const T* part(int64_t token, int64_t index) const {
    return static_cast<const T*>(task.x) + (3 * token + index) * task.conv.channels + first;
  }
  // B * x, rounded to the type in which it is kept.
  const T* inputs(int64_t token, T* scratch) const {
    const T* b = part(token, 0);
    const T* x = part(token, 2);
    for (int64_t i = 0; i < width; i += kLanes) {
      Elem<T>::store(scratch + i, mul(Elem<T>::load(b + i), Elem<T>::load(x + i)));
    }
    return scratch;
  }
  float* results(int64_t) const { return sums; }

  void finish(int64_t token, const float* y) const {
    const T* c = part(token, 1);
    T* out = static_cast<T*>(task.out) + token * task.conv.channels + first;
    for (int64_t i = 0; i < width; i += kLanes) {
      Elem<T>::store(out + i, mul(Elem<T>::load(c + i), load(y + i)));
    }
  }
};

// A unit is a row and `kConvChannels` channels.
template <class T>
void short_conv_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const ShortConvTask*>(context);
  const int64_t channels = task.conv.channels, ranges = ceil_div(channels, kConvChannels);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit % ranges * kConvChannels, left = channels - first;
    const int64_t width = left < kConvChannels ? left : kConvChannels;
    float* sums = worker.arena.take<float>(width);
    convolve<T>(task.conv, unit / ranges, ShortConvChannels<T>{task, first, width, sums}, worker.arena);
  }
}

}  // namespace cadenza::CADENZA_ISA
