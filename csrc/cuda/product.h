// Products of activations with a weight, which operations hand to the kernels of its format.
//
// An output element is one float32 sum over K, in an order that follows from the weight's shape and
// format alone, then the epilogue (epilogue.h). So a row has the same bits in every number of rows and
// from every kernel of a format.
#pragma once

#include <cstdint>

#include "core/tasks.h"
#include "cuda/launch.h"

namespace cadenza::cuda {

// A weight in the device's memory. Floats are [N, K], with the elements of a row side by side; each
// other format has a layout of its own, which its kernels check by `shape`.
struct Weight {
  const void* data;
  WeightFormat format;
  const int64_t* shape;
  int rank;
};

// Several products of one shape: x, w and out of head h are h times so many bytes further. Without
// bias and residual.
struct Heads {
  int64_t num = 1, x_bytes = 0, w_bytes = 0, out_bytes = 0;
};

// out = residual + scale (x w + bias), or, gated, activation(x w_gate + bias_gate) · (x w_up + bias_up)
// without residual and scale. Pointers are null while a program is measured, but bias and residual
// say then, too, whether they are there: the workspace depends on it.
struct ProductTask {
  int64_t rows;  // to compute: of a bucket, since the host does not know the true number
  int64_t n, k;  // columns of the product, both halves of a gated one, and its reduction
  const void* x;
  DType x_type;
  Weight w;
  void* out;
  bool out_is_f32;  // or the type of x

  const float* bias = nullptr;      // [N]; gated: [2, F], the gate's first; or null
  const float* residual = nullptr;  // [rows, N]; may alias out; or null
  float scale = 1.0f;
  bool is_gated = false;  // N = 2 F, the gate's columns before the others; out [rows, F]
  Activation activation = Activation::kSilu;

  const int32_t* count = nullptr;          // on the device: rows from it on may be left out; or null
  int64_t x_stride = 0, out_stride = 0;  // elements from row to row; 0: rows are side by side
  Heads heads;

  int64_t out_columns() const { return is_gated ? n / 2 : n; }
  int64_t row_of_x() const { return x_stride > 0 ? x_stride : k; }
  int64_t row_of_out() const { return out_stride > 0 ? out_stride : out_columns(); }
};

// Launches a product by the kernels of its weight's format. What the workspace has given before stays.
// Throws std::invalid_argument where there is no kernel.
void product(const ProductTask& task, Workspace& workspace);

// Of the formats, as product() calls them.
void float_product(const ProductTask& task, Workspace& workspace);
void code_product(const ProductTask& task, Workspace& workspace);
void float8_product(const ProductTask& task, Workspace& workspace);

// Whether the axes from `first` on are those of a weight of its format with N columns and reduction K.
bool fits(const Weight& w, int first, int64_t n, int64_t k);
bool codes_fit(const Weight& w, int first, int64_t n, int64_t k);
bool float8_fits(const Weight& w, int first, int64_t n, int64_t k);

}  // namespace cadenza::cuda
