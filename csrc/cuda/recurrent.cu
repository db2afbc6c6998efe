// Layers with a state: gated delta nets, gated short convolutions and selective scans, as core/tasks.h
// defines them. Pools have the layouts of the CPU's and are updated in place.
//
// A layer is a convolution over all tokens at once, then its matrices, a token after another with
// heads and columns in parallel, then norms and gates of all tokens.
#include "cuda/bodies.h"
#include "cuda/convolution.h"
#include "cuda/state_matrices.h"

namespace cadenza::cuda {

namespace {

constexpr float kUnitNormEps = 1e-6f;
constexpr int kSegment = 128;
constexpr unsigned kMostNormThreads = 256;

// The segments of channels that no head divides.
struct PlainSegments {
  int channels;
  __host__ __device__ int num_segments() const { return (channels + kSegment - 1) / kSegment; }
  __device__ Segment segment(int index) const {
    return {index * kSegment, min(kSegment, channels - index * kSegment)};
  }
};

// What a layer with matrices is given of each token, and where its convolved channels and rates go.
template <class T>
struct MatrixInputs {
  const T* x;  // [tokens, channels]
  const float* given_rates;
  const float* decay;
  const float* rate_bias;
  float* mixed;  // [tokens, channels]
  float* rates;  // [tokens, 2, heads]
  int channels, heads;

  __device__ T input(int token, int channel) const { return x[int64_t(token) * channels + channel]; }
  __device__ float given(int token, int parts, int part, int head) const {
    return given_rates[(int64_t(token) * parts + part) * heads + head];
  }
  __device__ void put_rates(int token, int head, float decay_, float rate) const {
    rates[int64_t(token) * 2 * heads + head] = decay_;
    rates[(int64_t(token) * 2 + 1) * heads + head] = rate;
  }
  __device__ void put(int token, const Segment& segment, int lane, const float (&values)[kPerLane],
                      float factor = 1.0f) const {
    float* to = mixed + int64_t(token) * channels + segment.first;
    for (int i = 0; i < kPerLane; i++) {
      const int at = i * kWarp + lane;
      if (at < segment.width) to[at] = values[i] * factor;
    }
  }
};

// A segment is a head of queries, of keys or of values.
template <class T>
struct DeltaChannels : MatrixInputs<T> {
  int key_heads, keys, values;

  __host__ __device__ int num_segments() const { return 2 * key_heads + this->heads; }
  __device__ Segment segment(int index) const {
    const int value = index - 2 * key_heads;
    if (value < 0) return {index * keys, keys};
    return {2 * key_heads * keys + value * values, values};
  }
  __device__ void prepare(int token, int lane) const {
    for (int head = lane; head < this->heads; head += kWarp) {
      const float input = this->given(token, 2, 0, head) + this->rate_bias[head];
      this->put_rates(token, head, exp_of(softplus(input) * this->decay[head]),
                      sigmoid(this->given(token, 2, 1, head)));
    }
  }
  // SiLU; queries and keys are divided by their L2 norms, and queries by the root of their size.
  __device__ void finish(int token, int index, int lane, const float (&sums)[kPerLane]) const {
    float y[kPerLane], squares = 0.0f;
    for (int i = 0; i < kPerLane; i++) {
      y[i] = silu(sums[i]);
      squares = fmaf(y[i], y[i], squares);
    }
    if (index >= 2 * key_heads) return this->put(token, segment(index), lane, y);
    float factor = 1.0f / sqrtf(warp_sum(squares) + kUnitNormEps);
    if (index < key_heads) factor *= 1.0f / sqrtf(float(keys));
    this->put(token, segment(index), lane, y, factor);
  }
};

template <class T>
struct ScanChannels : MatrixInputs<T> {
  __host__ __device__ PlainSegments segments() const { return PlainSegments{this->channels}; }
  __host__ __device__ int num_segments() const { return segments().num_segments(); }
  __device__ void prepare(int token, int lane) const {
    for (int head = lane; head < this->heads; head += kWarp) {
      const float rate = softplus(this->given(token, 1, 0, head) + this->rate_bias[head]);
      this->put_rates(token, head, exp_of(rate * this->decay[head]), rate);
    }
  }
  __device__ Segment segment(int index) const { return segments().segment(index); }
  __device__ void finish(int token, int index, int lane, const float (&sums)[kPerLane]) const {
    float y[kPerLane];
    for (int i = 0; i < kPerLane; i++) y[i] = silu(sums[i]);
    this->put(token, segment(index), lane, y);
  }
};

// C * conv(B * x), whose product is rounded to the type in which it is kept.
template <class T>
struct ShortConvChannels {
  const T* x;  // [tokens, 3, channels]: B, C, x
  T* out;      // [tokens, channels]
  int channels;

  __host__ __device__ int num_segments() const { return PlainSegments{channels}.num_segments(); }
  __device__ Segment segment(int index) const { return PlainSegments{channels}.segment(index); }
  __device__ float part(int token, int index, int channel) const {
    return to_float(x[(int64_t(token) * 3 + index) * channels + channel]);
  }
  __device__ T input(int token, int channel) const {
    return from_float<T>(part(token, 0, channel) * part(token, 2, channel));
  }
  __device__ void prepare(int, int) const {}
  __device__ void finish(int token, int index, int lane, const float (&sums)[kPerLane]) const {
    const Segment own = segment(index);
    for (int i = 0; i < kPerLane; i++) {
      const int at = i * kWarp + lane, channel = own.first + at;
      if (at < own.width) out[int64_t(token) * channels + channel] = from_float<T>(part(token, 1, channel) * sums[i]);
    }
  }
};

// The RMS norm of each group of a token's outputs, and the SiLU of a gate.
struct GatedNorm {
  SlotRows slots;
  float* y;             // [tokens, width]
  const float* weight;  // [groups or 1, group]
  float eps;
  int width, group;
  bool gates_first;        // before the norm; else its result
  bool has_group_weights;  // a weight for each group, or one for all
};

// A block for each token and group; the order of the sum follows from the group.
template <class T>
__global__ void norm_kernel(const GatedNorm norm, const T* gate, T* out) {
  __shared__ float partials[kMostNormThreads / kWarp];
  const int token = int(blockIdx.x), first = int(blockIdx.y) * norm.group;
  if (token >= norm.slots.num_tokens()) return;
  const int64_t begin = int64_t(token) * norm.width + first;
  float* y = norm.y + begin;
  float sum = 0.0f;
  for (int i = int(threadIdx.x); i < norm.group; i += int(blockDim.x)) {
    if (norm.gates_first) y[i] *= silu(to_float(gate[begin + i]));
    sum = fmaf(y[i], y[i], sum);
  }
  const float mean = block_sum(sum, partials) / float(norm.group);
  const float scale = 1.0f / sqrtf(mean + norm.eps);
  const float* weight = norm.weight + (norm.has_group_weights ? first : 0);
  for (int i = int(threadIdx.x); i < norm.group; i += int(blockDim.x)) {
    float normed = y[i] * scale * weight[i];
    if (!norm.gates_first) normed *= silu(to_float(gate[begin + i]));
    out[begin + i] = from_float<T>(normed);
  }
}

template <class T>
void run_norm(const GatedNorm& norm, const T* gate, T* out) {
  const unsigned wanted = unsigned(ceil_div(norm.group, int64_t(4 * kWarp)) * kWarp);
  launch(norm_kernel<T>, dim3{unsigned(norm.slots.tokens), unsigned(norm.width / norm.group)},
         std::min(wanted, kMostNormThreads), 0, norm, gate, out);
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::DepthwiseConv;
using cuda::MatrixTask;
using cuda::SlotRows;
using cuda::Workspace;

template <class T>
constexpr ffi::DataType kTypeOf = ffi::F32;
template <>
constexpr ffi::DataType kTypeOf<bf16> = ffi::BF16;

const float* f32(const Any& buffer, int64_t elements, const char* message) {
  require(buffer.element_type() == ffi::F32 && int64_t(buffer.element_count()) == elements, message);
  return data<float>(buffer);
}

template <class T>
bool is_rows(const Any& buffer, int64_t tokens, int64_t width) {
  return buffer.element_type() == kTypeOf<T> && dim(buffer, 0) >= tokens && dim(buffer, 1) == width;
}

template <class Call>
SlotRows slot_rows(const Call& c) {
  SlotRows slots{};
  slots.query_starts = int32(c.query_starts);
  slots.initial = int32(c.initial);
  slots.kept = int32(c.kept);
  slots.rows = int(dim(c.initial, 0));
  slots.tokens = int(cuda::rows_to_compute(std::min(dim(c.x, 0), dim(c.kept, 0))));
  slots.num_slots = int(dim(c.conv_pool, 0));
  slots.num_layers = int(dim(c.conv_pool, 1));
  slots.layer = int(c.layer);
  require(dim(c.query_starts, 0) == slots.rows + 1, "query_starts must be [R + 1]");
  require(c.layer >= 0 && c.layer < slots.num_layers, "layer is outside the pools' layers");
  return slots;
}

template <class T, class Call>
DepthwiseConv<T> convolution(const Call& c, const Any& conv_bias) {
  DepthwiseConv<T> conv{};
  conv.slots = slot_rows(c);
  conv.taps = int(dim(c.conv_weight, 0));
  conv.channels = int(dim(c.conv_weight, 1));
  conv.weight = f32(c.conv_weight, int64_t(conv.taps) * conv.channels, "conv_weight must be f32 [taps, C]");
  conv.bias = optional_f32(conv_bias);
  conv.pool = static_cast<T*>(c.conv_out.untyped_data());
  require(conv.taps >= 1 && conv.taps <= cuda::kMostTaps, "a convolution must have 1 to 8 taps");
  require(conv.channels % kLanes == 0, "the number of channels must be a multiple of 16");
  require(conv_bias.element_count() == 0 || int64_t(conv_bias.element_count()) == conv.channels,
          "conv_bias must be f32 [C], or [0]");
  const bool is_bf16 = kTypeOf<T> == ffi::BF16;
  require(c.conv_pool.element_type() == (is_bf16 ? ffi::U16 : ffi::F32) &&
              dim(c.conv_pool, 2) == conv.taps - 1 && dim(c.conv_pool, 3) == conv.channels,
          "conv_pool must be u16 beside bf16, or f32 beside f32, [slots, layers, taps - 1, C]");
  require(c.conv_out.untyped_data() == c.conv_pool.untyped_data(),
          "conv_pool must be donated and aliased to its result");
  return conv;
}

// The matrices of a layer's heads, and the workspace for what its tokens become on the way.
MatrixTask matrix_task(const Any& pool, const Any& out, const SlotRows& slots, int channels,
                       Workspace& workspace) {
  MatrixTask task{};
  task.slots = slots;
  task.pool = static_cast<float*>(out.untyped_data());
  task.heads = int(dim(pool, 2));
  task.values = int(dim(pool, 3) * kLanes);
  task.keys = int(dim(pool, 4));
  task.channels = channels;
  require(pool.element_type() == ffi::F32 && dim(pool, 0) == slots.num_slots &&
              dim(pool, 1) == slots.num_layers && dim(pool, 5) == kLanes,
          "state_pool must be f32 [slots, layers, heads, values / 16, keys, 16]");
  require(task.keys % kLanes == 0 && task.keys <= cuda::kMostKeys,
          "the number of keys must be a multiple of 16, at most 256");
  require(task.values <= cuda::kMostSegment, "a head must have at most 256 values");
  require(out.untyped_data() == pool.untyped_data(),
          "state_pool must be donated and aliased to its result");
  task.mixed = workspace.take<float>(int64_t(slots.tokens) * channels);
  task.rates = workspace.take<float>(int64_t(slots.tokens) * 2 * task.heads);
  task.outputs = workspace.take<float>(int64_t(slots.tokens) * task.heads * task.values);
  return task;
}

// What the convolution of a layer with matrices is given.
template <class T>
cuda::MatrixInputs<T> matrix_inputs(const MatrixTask& task, const Any& x, const Any& rates, int64_t parts,
                                    const Any& decay, const Any& rate_bias) {
  const int64_t heads = task.heads, tokens = task.slots.tokens;
  require(is_rows<T>(x, tokens, task.channels), "x must be act [T, C]");
  require(is_rows<float>(rates, tokens, parts * heads), "rates must be f32 [T, 2 Hv], or [T, H] of a scan");
  return {data<T>(x),
          data<float>(rates),
          f32(decay, heads, "decay must be f32 [H]"),
          f32(rate_bias, heads, "the bias of the decay, or of the rate, must be f32 [H]"),
          const_cast<float*>(task.mixed),
          const_cast<float*>(task.rates),
          task.channels,
          task.heads};
}

cuda::GatedNorm gated_norm(const MatrixTask& task, const Any& weight, int64_t elements, float eps) {
  cuda::GatedNorm norm{};
  norm.slots = task.slots;
  norm.y = task.outputs;
  norm.weight = f32(weight, elements, "norm_weight must be f32 [Dv], or [H D] of a scan");
  norm.eps = eps;
  norm.width = task.heads * task.values;
  return norm;
}

template <class T>
void check_gate(const Any& gate, const Any& out, const MatrixTask& task) {
  const int64_t width = int64_t(task.heads) * task.values;
  require(is_rows<T>(gate, task.slots.tokens, width), "gate must have x's type, [T, H D]");
  require(is_rows<T>(out, task.slots.tokens, width), "the result must have x's type, [T, H D]");
}

template <class T>
void gated_delta(const calls::gated_delta& c) {
  Workspace workspace;
  const DepthwiseConv<T> conv = convolution<T>(c, absent());
  MatrixTask task = matrix_task(c.state_pool, c.state_out, conv.slots, conv.channels, workspace);
  require(c.key_heads > 0 && task.heads % c.key_heads == 0,
          "the number of value heads must be a multiple of the number of key heads");
  task.key_heads = int(c.key_heads);
  task.tiled = c.tiled;
  task.first_key = task.key_heads * task.keys;
  task.first_value = 2 * task.first_key;
  require(conv.channels == task.first_value + task.heads * task.values,
          "conv_weight must be [taps, 2 Hk Dk + Hv Dv]");
  check_gate<T>(c.gate, c.out, task);
  const cuda::DeltaChannels<T> channels{
      matrix_inputs<T>(task, c.x, c.rates, 2, c.decay, c.decay_bias), task.key_heads, task.keys,
      task.values};
  cuda::GatedNorm norm = gated_norm(task, c.norm_weight, task.values, c.norm_eps);
  norm.group = task.values;
  cuda::convolve(conv, channels);
  cuda::run_matrices<cuda::DeltaRule>(task);
  cuda::run_norm(norm, data<T>(c.gate), static_cast<T*>(c.out.untyped_data()));
}

template <class T>
void selective_scan(const calls::selective_scan& c) {
  Workspace workspace;
  const DepthwiseConv<T> conv = convolution<T>(c, c.conv_bias);
  MatrixTask task = matrix_task(c.state_pool, c.state_out, conv.slots, conv.channels, workspace);
  require(c.groups > 0 && task.heads % c.groups == 0, "the number of heads must be a multiple of groups");
  const int width = task.heads * task.values;
  task.key_heads = int(c.groups);
  task.first_key = width;
  task.first_query = width + task.key_heads * task.keys;
  require(conv.channels == width + 2 * task.key_heads * task.keys, "conv_weight must be [taps, H D + 2 G N]");
  check_gate<T>(c.gate, c.out, task);
  task.skip = f32(c.skip, task.heads, "skip must be f32 [H]");
  const cuda::ScanChannels<T> channels{
      matrix_inputs<T>(task, c.x, c.rates, 1, c.decay, c.rate_bias)};
  cuda::GatedNorm norm = gated_norm(task, c.norm_weight, width, c.norm_eps);
  norm.group = width / task.key_heads;
  norm.gates_first = norm.has_group_weights = true;
  cuda::convolve(conv, channels);
  cuda::run_matrices<cuda::ScanRule>(task);
  cuda::run_norm(norm, data<T>(c.gate), static_cast<T*>(c.out.untyped_data()));
}

template <class T>
void short_conv(const calls::short_conv& c) {
  const DepthwiseConv<T> conv = convolution<T>(c, c.conv_bias);
  require(is_rows<T>(c.x, conv.slots.tokens, 3 * int64_t(conv.channels)), "x must be act [T, 3 C]");
  require(is_rows<T>(c.out, conv.slots.tokens, conv.channels), "the result must have x's type, [T, C]");
  cuda::convolve(conv, cuda::ShortConvChannels<T>{data<T>(c.x), static_cast<T*>(c.out.untyped_data()), conv.channels});
}

}  // namespace

void execute(const calls::gated_delta& c) {
  element_type(c.x) == DType::kBf16 ? gated_delta<bf16>(c) : gated_delta<float>(c);
}

void execute(const calls::short_conv& c) {
  element_type(c.x) == DType::kBf16 ? short_conv<bf16>(c) : short_conv<float>(c);
}

void execute(const calls::selective_scan& c) {
  element_type(c.x) == DType::kBf16 ? selective_scan<bf16>(c) : selective_scan<float>(c);
}

}  // namespace cadenza::xla_ffi
