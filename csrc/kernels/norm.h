// RMSNorm and the embedding. A unit is one row.
#pragma once

#include "core/kernel_table.h"
#include "kernels/math.h"

namespace cadenza::CADENZA_ISA {

constexpr int kNormSums = 4;

// Accumulates 64 partial sums in a pattern fixed by the width, then adds them in a fixed tree.
template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
  Vec sums[kNormSums] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kNormSums * kLanes <= width; i += kNormSums * kLanes) {
    for (int j = 0; j < kNormSums; j++) {
      Vec v = Elem<T>::load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < width; i += kLanes, j++) {
    Vec v = load_some(x + i, int(width - i < kLanes ? width - i : kLanes));
    sums[j] = fma(v, v, sums[j]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class T>
inline float inverse_rms(const T* x, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / float(width) + eps);
}

template <class T>
void norm_row(const NormTask& task, int64_t row) {
  const float* x = task.x + row * task.width;
  Vec scale = set1(inverse_rms(x, task.width, task.eps));
  for (int64_t i = 0; i < task.width; i += kLanes) {
    int n = int(task.width - i < kLanes ? task.width - i : kLanes);
    int64_t at = row * task.width + i;
    Vec y = mul(mul(load_some(x + i, n), scale), load_some(task.weight + i, n));
    if (task.residual != nullptr) y = add(y, load_some(task.residual + at, n));
    if (task.factor != nullptr) y = mul(y, set1(*task.factor));
    if (task.out_is_f32) {
      store_some(static_cast<float*>(task.out) + at, y, n);
    } else {
      store_some(static_cast<T*>(task.out) + at, y, n);
    }
  }
}

template <class T>
void norm_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const NormTask*>(context);
  for (int64_t row = begin; row < end; row++) norm_row<T>(task, row);
}

inline Vec gated(Activation activation, Vec gate, Vec up) {
  switch (activation) {
    case Activation::kSilu:
      return mul(silu(gate), up);
    case Activation::kGeluTanh:
      return mul(gelu_tanh(gate), up);
    case Activation::kGelu:
      return mul(gelu(gate), up);
    case Activation::kClampedSwiglu:
      return clamped_swiglu(gate, up);
  }
  return gate;
}

template <class T>
void gate_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const GateTask*>(context);
  for (int64_t row = begin; row < end; row++) {
    const float* x = task.x + row * task.width;
    const float* inputs = task.inputs + row * task.input_width + task.first;
    T* out = static_cast<T*>(task.out) + row * task.width;
    for (int64_t i = 0; i < task.width; i += kLanes) {
      int n = int(task.width - i < kLanes ? task.width - i : kLanes);
      store_some(out + i, gated(task.activation, load_some(x + i, n), load_some(inputs + i, n)), n);
    }
  }
}

// A unit is a row of f32 to convert to T.
template <class T>
void convert_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const ConvertTask*>(context);
  for (int64_t i = begin * task.width; i < end * task.width; i += kLanes) {
    int n = int(end * task.width - i < kLanes ? end * task.width - i : kLanes);
    store_some(static_cast<T*>(task.out) + i, load_some(task.x + i, n), n);
  }
}

// One element of a packed weight, as f32.
template <class T>
inline float packed_element(const T* table, int64_t width, int64_t row, int64_t i) {
  int64_t steps = ceil_div(width, kStep<T>);
  int64_t panel = row / kPanel, column = row % kPanel;
  const T* at = table + ((panel * steps + i / kStep<T>)*kPanel + column) * kStep<T> + i % kStep<T>;
  if constexpr (kStep<T> == 2) {
    uint32_t raw = uint32_t(at->bits) << 16;
    float value;
    __builtin_memcpy(&value, &raw, 4);
    return value;
  } else {
    return *at;
  }
}

template <class T>
void embed_row(const EmbedTask& task, int64_t row) {
  float* out = task.out + row * task.width;
  const T* table = static_cast<const T*>(task.table);
  int64_t id = task.token_ids[row];
  if (id < 0 || id >= task.vocab) {
    for (int64_t i = 0; i < task.width; i++) out[i] = 0.0f;
  } else if (task.packed) {
    for (int64_t i = 0; i < task.width; i++) {
      out[i] = packed_element(table, task.width, id, i) * task.scale;
    }
  } else {
    for (int64_t i = 0; i < task.width; i += kLanes) {
      int n = int(task.width - i < kLanes ? task.width - i : kLanes);
      store_some(out + i, mul(load_some(table + id * task.width + i, n), set1(task.scale)), n);
    }
  }
}

template <class T>
void embed_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const EmbedTask*>(context);
  for (int64_t row = begin; row < end; row++) embed_row<T>(task, row);
}

}  // namespace cadenza::CADENZA_ISA
