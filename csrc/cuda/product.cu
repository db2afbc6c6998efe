// Products by the format of their weight, and the operations that are one product.
#include "cuda/product.h"

#include "cuda/bodies.h"

namespace cadenza::cuda {

void product(const ProductTask& task, Workspace& workspace) {
  switch (task.w.format) {
    case WeightFormat::kBf16:
    case WeightFormat::kF32:
      return float_product(task, workspace);
    case WeightFormat::kCodes:
      return code_product(task, workspace);
    case WeightFormat::kFloat8:
      return float8_product(task, workspace);
  }
}

bool fits(const Weight& w, int first, int64_t n, int64_t k) {
  if (w.format == WeightFormat::kCodes) return codes_fit(w, first, n, k);
  if (w.format == WeightFormat::kFloat8) return float8_fits(w, first, n, k);
  return w.rank == first + 2 && w.shape[first] == n && w.shape[first + 1] == k;
}

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::ProductTask;

// A bias or residual; while a program is measured, some address, so that it is not taken for absent.
const float* present(const Any& operand) {
  static const float measured = 0.0f;
  const float* found = optional_f32(operand);
  return operand.element_count() > 0 && cuda::context.is_measured ? &measured : found;
}

// What every product of rows of x has; the caller adds the number of columns and the epilogue.
ProductTask task_of(const Any& x, const Any& w, const Any& count, const Any& out) {
  ProductTask task{};
  task.rows = cuda::rows_to_compute(dim(out, 0));
  task.k = dim(x, 1);
  task.x = x.untyped_data();
  task.x_type = product_types(x, w).activation;
  task.w = weight_of(w);
  task.out = out.untyped_data();
  task.out_is_f32 = out.element_type() == ffi::F32;
  task.count = device_count(count);
  require(dim(x, 0) >= task.rows, "x has too few rows");
  require(task.out_is_f32 || element_type(out) == task.x_type, "the result must be f32 or x's type");
  return task;
}

void run(const ProductTask& task) {
  require(cuda::fits(task.w, 0, task.n, task.k), "the weight's shape does not fit its columns and reduction");
  cuda::Workspace workspace;
  cuda::product(task, workspace);
}

Activation activation_of(int64_t code) {
  require(code >= 0 && code < kNumActivations,
          "activation must be 0 (silu), 1 (gelu_tanh), 2 (gelu) or 3 (clamped_swiglu)");
  return static_cast<Activation>(code);
}

}  // namespace

void execute(const calls::linear& c) {
  ProductTask task = task_of(c.x, c.w, c.count, c.out);
  task.n = dim(c.out, 1);
  task.bias = present(c.bias);
  require(c.bias.element_count() == 0 || dim(c.bias, 0) == task.n, "the bias must be f32 [N] or empty");
  task.residual = present(c.residual);
  task.scale = c.scale;
  run(task);
}

void execute(const calls::gated_linear& c) {
  ProductTask task = task_of(c.x, c.w, c.count, c.out);
  require(task.out_is_f32 == (task.x_type == DType::kF32), "the result must have x's type");
  task.n = 2 * dim(c.out, 1);
  task.bias = present(c.bias);
  require(c.bias.element_count() == 0 || int64_t(c.bias.element_count()) == task.n,
          "the bias must be f32 [2, F] or empty");
  task.is_gated = true;
  task.activation = activation_of(c.activation);
  run(task);
}

void execute(const calls::head_linear& c) {
  const int64_t heads = dim(c.w, 0);
  require(heads > 0 && dim(c.x, 1) % heads == 0 && dim(c.out, 1) % heads == 0,
          "x must be [T, Hq D] and the result [T, Hq N]");
  const int64_t part = dim(c.x, 1) / heads;
  require(c.width > 0 && c.width <= part, "the width must be within a head's part of x");
  ProductTask task = task_of(c.x, c.w, c.count, c.out);
  require(task.out_is_f32 == (task.x_type == DType::kF32), "the result must have x's type");
  task.n = dim(c.out, 1) / heads;
  task.k = c.width;
  task.x_stride = dim(c.x, 1);
  task.out_stride = dim(c.out, 1);
  require(cuda::fits(task.w, 1, task.n, task.k), "the heads' weights do not fit the result and the width");
  const int64_t element = bytes_of(task.x_type);
  task.heads = {heads, part * element, int64_t(c.w.size_bytes()) / heads, task.n * element};
  task.w.shape++;
  task.w.rank--;
  cuda::Workspace workspace;
  cuda::product(task, workspace);
}

}  // namespace cadenza::xla_ffi
