// Operations of image towers: layer norm, activations, and rows of embeddings among tokens. A unit is
// one row.
#pragma once

#include "core/encoder_tasks.h"
#include "kernels/norm.h"

namespace cadenza::CADENZA_ISA {

// Adds up f(x) in the pattern of sum_of_squares. `f` is given the lanes within the width.
template <class F>
inline float sum_over(const float* x, int64_t width, const F& f) {
  Vec sums[kNormSums] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0, j = 0; i < width; i += kLanes, j = (j + 1) % kNormSums) {
    const int n = int(width - i < kLanes ? width - i : kLanes);
    sums[j] = add(sums[j], select(first(n), f(load_some(x + i, n)), zero()));
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class T>
void layer_norm_row(const LayerNormTask& task, int64_t row) {
  const float* x = task.x + row * task.width;
  const Vec mean = set1(sum_over(x, task.width, [](Vec v) { return v; }) / float(task.width));
  const float squares = sum_over(x, task.width, [=](Vec v) {
    const Vec distance = sub(v, mean);
    return mul(distance, distance);
  });
  const Vec scale = set1(1.0f / __builtin_sqrtf(squares / float(task.width) + task.eps));
  T* out = static_cast<T*>(task.out) + row * task.width;
  for (int64_t i = 0; i < task.width; i += kLanes) {
    const int n = int(task.width - i < kLanes ? task.width - i : kLanes);
    const Vec y = mul(sub(load_some(x + i, n), mean), scale);
    const Vec weight = load_some(task.weight + i, n);
    const Vec bias = task.bias == nullptr ? zero() : load_some(task.bias + i, n);
    store_some(out + i, fma(y, weight, bias), n);
  }
}

template <class T>
void layer_norm_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const LayerNormTask*>(context);
  for (int64_t row = begin; row < end; row++) layer_norm_row<T>(task, row);
}

inline Vec activated(EncoderActivation activation, Vec x) {
  switch (activation) {
    case EncoderActivation::kSilu:
      return silu(x);
    case EncoderActivation::kGeluTanh:
      return gelu_tanh(x);
    case EncoderActivation::kGelu:
      return gelu(x);
    case EncoderActivation::kQuickGelu:
      return mul(x, sigmoid(mul(x, set1(1.702f))));
  }
  return x;
}

template <class T>
void activate_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const ActivateTask*>(context);
  const int64_t last = end * task.width;
  for (int64_t i = begin * task.width; i < last; i += kLanes) {
    const int n = int(last - i < kLanes ? last - i : kLanes);
    const Vec x = load_some(static_cast<const T*>(task.x) + i, n);
    store_some(static_cast<T*>(task.out) + i, activated(task.activation, x), n);
  }
}

template <class T>
void place_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const PlaceRowsTask*>(context);
  const ImageRowsTask& rows = task.rows;
  for (int64_t row = begin; row < end; row++) {
    const int64_t slot = rows.slots[row];
    if (slot < 0 || slot >= rows.slots_count) continue;
    const T* from =
        static_cast<const T*>(task.images) + (slot * rows.parts + rows.part) * rows.width;
    float* x = task.x + row * rows.width;
    for (int64_t i = 0; i < rows.width; i += kLanes) {
      const int n = int(rows.width - i < kLanes ? rows.width - i : kLanes);
      const Vec y = load_some(from + i, n);
      store_some(x + i, task.adds ? add(load_some(x + i, n), y) : y, n);
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
