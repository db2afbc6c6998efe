// What a product does with its float32 sums, by the same roundings in the kernels of every format.
#pragma once

#include "cuda/math.h"
#include "cuda/product.h"

namespace cadenza::cuda {

struct Epilogue {
  const float* bias;
  const float* residual;
  float scale;
  void* out;
  bool out_is_f32;
  int64_t columns;  // of out
  int64_t stride;   // elements from row to row of out
  Activation activation;

  __device__ __forceinline__ void store(int64_t row, int64_t column, float value) const {
    const int64_t at = row * stride + column;
    if (out_is_f32) {
      static_cast<float*>(out)[at] = value;
    } else {
      static_cast<bf16*>(out)[at] = to_bf16(value);
    }
  }

  __device__ __forceinline__ void finish(int64_t row, int64_t column, float sum) const {
    float value = bias == nullptr ? sum : sum + bias[column];
    value *= scale;
    if (residual != nullptr) value = residual[row * columns + column] + value;
    store(row, column, value);
  }

  __device__ __forceinline__ void finish_gated(int64_t row, int64_t column, float gate, float up) const {
    if (bias != nullptr) {
      gate += bias[column];
      up += bias[columns + column];
    }
    store(row, column, gated(activation, gate, up));
  }
};

inline Epilogue epilogue_of(const ProductTask& task) {
  return {task.bias,
          task.residual,
          task.scale,
          task.out,
          task.out_is_f32 || task.x_type == DType::kF32,
          task.out_columns(),
          task.row_of_out(),
          task.activation};
}

}  // namespace cadenza::cuda
