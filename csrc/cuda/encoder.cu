// What image towers do beside products and attention: layer norm, activations, and rows of embeddings
// among tokens.
#include "core/encoder_tasks.h"
#include "cuda/bodies.h"
#include "cuda/math.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 256;

struct LayerNorm {
  const float* x;
  const float* weight;
  const float* bias;  // or null
  const int32_t* count;
  float eps;
  int width;
};

// A block is a row. The sums have an order that follows from the width.
template <class T>
__global__ void layer_norm_kernel(LayerNorm norm, T* out) {
  __shared__ float partials[kThreads / kWarp];
  if (int(blockIdx.x) >= *norm.count) return;
  const int64_t row = int64_t(blockIdx.x) * norm.width;
  const float* x = norm.x + row;
  float sum = 0.0f;
  for (int i = int(threadIdx.x); i < norm.width; i += int(blockDim.x)) sum += x[i];
  const float mean = block_sum(sum, partials) / float(norm.width);
  float squares = 0.0f;
  for (int i = int(threadIdx.x); i < norm.width; i += int(blockDim.x)) {
    const float distance = x[i] - mean;
    squares += distance * distance;
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, partials) / float(norm.width) + norm.eps);
  for (int i = int(threadIdx.x); i < norm.width; i += int(blockDim.x)) {
    const float bias = norm.bias == nullptr ? 0.0f : norm.bias[i];
    out[row + i] = from_float<T>(fmaf((x[i] - mean) * scale, norm.weight[i], bias));
  }
}

__device__ __forceinline__ float activated(EncoderActivation activation, float x) {
  switch (activation) {
    case EncoderActivation::kSilu:
      return silu(x);
    case EncoderActivation::kGeluTanh:
      return gelu_tanh(x);
    case EncoderActivation::kGelu:
      return gelu(x);
    case EncoderActivation::kQuickGelu:
      return x * sigmoid(x * 1.702f);
  }
  return x;
}

struct Rows {
  const int32_t* count;
  int width;
};

// The thread's element of its block's row; -1 if it has none.
__device__ __forceinline__ int own_element(const Rows& rows) {
  const int at = int(blockIdx.y * blockDim.x + threadIdx.x);
  return at < rows.width && int(blockIdx.x) < *rows.count ? at : -1;
}

template <class T>
__global__ void activate_kernel(Rows rows, EncoderActivation activation, const T* x, T* out) {
  const int at = own_element(rows);
  if (at < 0) return;
  const int64_t place = int64_t(blockIdx.x) * rows.width + at;
  out[place] = from_float<T>(activated(activation, to_float(x[place])));
}

// Rows of embeddings of images, as wide as `parts` rows of x; and the row of each row of x.
struct Slots {
  const int32_t* slots;
  int count, parts, part;

  // The first element of the part of this block's row; -1 if it has no slot.
  __device__ __forceinline__ int64_t place(int width) const {
    const int slot = slots[blockIdx.x];
    return slot < 0 || slot >= count ? -1 : (int64_t(slot) * parts + part) * width;
  }
};

template <class T>
__global__ void keep_rows_kernel(Rows rows, Slots slots, const T* x, T* images) {
  const int at = own_element(rows);
  if (at < 0) return;
  const int64_t place = slots.place(rows.width);
  if (place >= 0) images[place + at] = x[int64_t(blockIdx.x) * rows.width + at];
}

template <class T>
__global__ void place_rows_kernel(Rows rows, Slots slots, bool adds, const T* images, float* x) {
  const int at = own_element(rows);
  if (at < 0) return;
  const int64_t place = slots.place(rows.width);
  if (place < 0) return;
  float& value = x[int64_t(blockIdx.x) * rows.width + at];
  const float y = to_float(images[place + at]);
  value = adds ? value + y : y;
}

template <class Kernel, class... A>
void launch_rows(Kernel* kernel, int64_t rows, const Rows& task, A... arguments) {
  const dim3 grid{unsigned(rows), unsigned(ceil_div(task.width, int64_t(kThreads)))};
  launch(kernel, grid, kThreads, 0, task, arguments...);
}

template <class T>
T* typed(const xla_ffi::Any& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::rows_to_compute;

bool is_f32(const Any& buffer) { return buffer.element_type() == ffi::F32; }

int64_t shared_rows(const Any& out, const Any& x) {
  return rows_to_compute(std::min(dim(out, 0), dim(x, 0)));
}

}  // namespace

void execute(const calls::layer_norm& c) {
  const int64_t width = dim(c.out, 1);
  require(is_f32(c.x) && dim(c.x, 1) == width, "x must be f32 [B, E]");
  require(dim(c.weight, 0) == width, "the norm's weight must be f32 [E]");
  const cuda::LayerNorm norm{data<float>(c.x),      optional_f32(c.weight), optional_f32(c.bias),
                             device_count(c.count), c.eps,                  int(width)};
  require(c.bias.element_count() == 0 || dim(c.bias, 0) == width, "the bias must be f32 [E] or empty");
  const dim3 grid{unsigned(shared_rows(c.out, c.x))};
  if (element_type(c.out) == DType::kBf16) {
    cuda::launch(cuda::layer_norm_kernel<bf16>, grid, cuda::kThreads, 0, norm, cuda::typed<bf16>(c.out));
  } else {
    cuda::launch(cuda::layer_norm_kernel<float>, grid, cuda::kThreads, 0, norm, cuda::typed<float>(c.out));
  }
}

void execute(const calls::activate& c) {
  const cuda::Rows task{device_count(c.count), int(dim(c.out, 1))};
  const auto activation = static_cast<EncoderActivation>(c.kind);
  require(c.kind >= 0 && c.kind < kNumEncoderActivations, "the activation is none of its kinds");
  require(element_type(c.out) == element_type(c.x) && dim(c.x, 1) == task.width,
          "x must be [B, F] of the result's type");
  const int64_t rows = shared_rows(c.out, c.x);
  if (element_type(c.x) == DType::kBf16) {
    cuda::launch_rows(cuda::activate_kernel<bf16>, rows, task, activation, data<bf16>(c.x), cuda::typed<bf16>(c.out));
  } else {
    cuda::launch_rows(cuda::activate_kernel<float>, rows, task, activation, data<float>(c.x),
                      cuda::typed<float>(c.out));
  }
}

namespace {

cuda::Slots slots_of(const Any& x, const Any& images, const Any& slots, int64_t part) {
  const int64_t width = dim(x, 1);
  require(width > 0 && dim(images, 1) % width == 0, "the rows of images must be parts as wide as x");
  const int64_t parts = dim(images, 1) / width;
  require(part >= 0 && part < parts, "the rows of images have no such part");
  require(slots.element_type() == ffi::S32 && dim(slots, 0) >= dim(x, 0), "there must be a slot for each row");
  return {data<int32_t>(slots), int(dim(images, 0)), int(parts), int(part)};
}

}  // namespace

void execute(const calls::keep_rows& c) {
  require(element_type(c.images) == element_type(c.x), "x must have the type of the images' rows");
  require(c.out.untyped_data() == c.images.untyped_data(), "images must be updated in place");
  const cuda::Rows task{device_count(c.count), int(dim(c.x, 1))};
  const cuda::Slots places = slots_of(c.x, c.images, c.slots, c.part);
  const int64_t rows = rows_to_compute(dim(c.x, 0));
  if (element_type(c.x) == DType::kBf16) {
    cuda::launch_rows(cuda::keep_rows_kernel<bf16>, rows, task, places, data<bf16>(c.x), cuda::typed<bf16>(c.out));
  } else {
    cuda::launch_rows(cuda::keep_rows_kernel<float>, rows, task, places, data<float>(c.x), cuda::typed<float>(c.out));
  }
}

void execute(const calls::place_rows& c) {
  require(is_f32(c.x) && is_f32(c.out), "x must be f32 [T, E]");
  require(c.out.untyped_data() == c.x.untyped_data(), "x must be updated in place");
  const cuda::Rows task{device_count(c.count), int(dim(c.x, 1))};
  const cuda::Slots places = slots_of(c.x, c.images, c.slots, c.part);
  const int64_t rows = rows_to_compute(dim(c.x, 0));
  auto* to = cuda::typed<float>(c.out);
  if (element_type(c.images) == DType::kBf16) {
    cuda::launch_rows(cuda::place_rows_kernel<bf16>, rows, task, places, c.adds, data<bf16>(c.images), to);
  } else {
    cuda::launch_rows(cuda::place_rows_kernel<float>, rows, task, places, c.adds, data<float>(c.images), to);
  }
}

}  // namespace cadenza::xla_ffi
