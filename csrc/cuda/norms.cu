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

// The sum of squares has an order that follows from the width.
template <class T>
__global__ void norm_kernel(Norm norm, T* out) {
  __shared__ float partials[kThreads / kWarp];
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

void run(const Norm& norm, int64_t rows, const xla_ffi::Any& out) {
  const dim3 grid{unsigned(rows)};
  if (out.element_type() == xla_ffi::ffi::F32) {
    launch(norm_kernel<float>, grid, kThreads, 0, norm, static_cast<float*>(out.untyped_data()));
  } else {
    launch(norm_kernel<bf16>, grid, kThreads, 0, norm, static_cast<bf16*>(out.untyped_data()));
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

ffi::Error rms_norm_call(Any x, Any weight, Any, AnyResult out, float eps) {
  return guarded("cadenza_rms_norm", [&] { norm(x, weight, absent(), absent(), *out, eps); });
}

ffi::Error rms_norm_add_call(Any x, Any weight, Any, Any residual, Any factor, AnyResult out,
                             float eps) {
  return guarded("cadenza_rms_norm_add",
                 [&] { norm(x, weight, residual, factor, *out, eps); });
}

}  // namespace cadenza::xla_ffi
