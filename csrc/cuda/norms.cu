// RMSNorm: a block for each row.
#include "cuda/bodies.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 256;

struct Norm {
  const float* x;
  const float* weight;
  const float* residual;  // or null
  const float* factor;    // or null
  float eps;
  int width;
};

// A thread's elements of a row, `Most` of them at most: all are on their way before the first is used.
template <int Most>
struct Elements {
  float values[Most];

  __device__ Elements(const float* from, int width, float behind) {
#pragma unroll
    for (int e = 0; e < Most; e++) values[e] = index(e) < width ? from[index(e)] : behind;
  }
  static __device__ int index(int e) { return int(threadIdx.x) + e * int(kThreads); }
};

// The sum of squares has an order that follows from the width.
template <class T, int Most>
__global__ void __launch_bounds__(kThreads) norm_kernel(Norm norm, T* out) {
  __shared__ float partials[kThreads / kWarp];
  take_turn();
  const int64_t row = int64_t(blockIdx.x) * norm.width;
  const Elements<Most> x(norm.x + row, norm.width, 0.0f), weight(norm.weight, norm.width, 0.0f);
  const bool is_added = norm.residual != nullptr;
  const Elements<Most> residual(is_added ? norm.residual + row : norm.x, is_added ? norm.width : 0, 0.0f);
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < Most; e++) {
    if (x.index(e) < norm.width) sum = fmaf(x.values[e], x.values[e], sum);
  }
  const float mean = block_sum(sum, partials) / float(norm.width);
  const float scale = 1.0f / sqrtf(mean + norm.eps);
  const float factor = norm.factor != nullptr ? *norm.factor : 1.0f;
#pragma unroll
  for (int e = 0; e < Most; e++) {
    float y = x.values[e] * scale * weight.values[e];
    if (is_added) y += residual.values[e];
    if (norm.factor != nullptr) y *= factor;
    if (x.index(e) < norm.width) out[row + x.index(e)] = from_float<T>(y);
  }
}

// The same, of wide rows.
template <class T>
__global__ void __launch_bounds__(kThreads) wide_norm_kernel(Norm norm, T* out) {
  __shared__ float partials[kThreads / kWarp];
  take_turn();
  const int64_t row = int64_t(blockIdx.x) * norm.width;
  const float* x = norm.x + row;
  float sum = 0.0f;
  for (int i = int(threadIdx.x); i < norm.width; i += int(blockDim.x)) sum = fmaf(x[i], x[i], sum);
  const float mean = block_sum(sum, partials) / float(norm.width);
  const float scale = 1.0f / sqrtf(mean + norm.eps);
  for (int i = int(threadIdx.x); i < norm.width; i += int(blockDim.x)) {
    float y = x[i] * scale * norm.weight[i];
    if (norm.residual != nullptr) y += norm.residual[row + i];
    if (norm.factor != nullptr) y *= *norm.factor;
    out[row + i] = from_float<T>(y);
  }
}

template <class T>
void run(const Norm& norm, int64_t rows, T* out) {
  const int each = int(ceil_div(norm.width, int64_t(kThreads)));
  const auto kernel = each <= 4    ? norm_kernel<T, 4>
                      : each <= 8  ? norm_kernel<T, 8>
                      : each <= 16 ? norm_kernel<T, 16>
                      : each <= 32 ? norm_kernel<T, 32>
                                   : wide_norm_kernel<T>;
  launch_early(kernel, dim3{unsigned(rows)}, kThreads, 0, norm, out);
}

void run(const Norm& norm, int64_t rows, const xla_ffi::Any& out) {
  if (out.element_type() == xla_ffi::ffi::F32) {
    run(norm, rows, static_cast<float*>(out.untyped_data()));
  } else {
    run(norm, rows, static_cast<bf16*>(out.untyped_data()));
  }
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

void norm(const Any& x, const Any& weight, const Any& residual, const Any& factor, const Any& out,
          float eps) {
  const int64_t width = dim(out, 1), parts = dim(weight, 0);
  require(x.element_type() == ffi::F32 && dim(x, 1) == width, "x must be f32 [T, E]");
  require(parts > 0 && width % parts == 0,
          "the norm's weight must be f32 [E], or of parts of equal width");
  element_type(out);
  const cuda::Norm task{data<float>(x), optional_f32(weight), optional_f32(residual),
                        optional_f32(factor), eps, int(parts)};
  cuda::run(task, cuda::rows_to_compute(dim(out, 0)) * (width / parts), out);
}

}  // namespace

void execute(const calls::rms_norm& c) {
  norm(c.x, c.weight, absent(), absent(), c.out, c.eps);
}

void execute(const calls::rms_norm_add& c) {
  norm(c.x, c.weight, c.residual, c.factor, c.out, c.eps);
}

}  // namespace cadenza::xla_ffi
