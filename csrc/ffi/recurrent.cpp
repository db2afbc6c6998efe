// Layers with a state as XLA calls them; they update the donated pools in place. Conventions: csrc/README.md.
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

// Which slots a step's rows begin with and keep, in pools [slots, layers, ...].
StateRows state_rows(const Any& query_starts, const Any& initial, const Any& kept, const Any& pool,
                     int64_t layer) {
  StateRows rows{};
  rows.rows = dim(initial, 0);
  rows.query_starts = int32(query_starts);
  rows.initial = int32(initial);
  rows.kept = int32(kept);
  rows.num_slots = dim(pool, 0);
  rows.num_layers = dim(pool, 1);
  rows.layer = layer;
  require(dim(query_starts, 0) == rows.rows + 1, "query_starts must be [R + 1]");
  require(layer >= 0 && layer < rows.num_layers, "layer is outside the pools' layers");
  require(rows.num_tokens() >= 0 && rows.num_tokens() <= dim(kept, 0),
          "query_starts ends outside the padded tokens");
  for (int64_t row = 0; row < rows.rows; row++) {
    require(rows.initial[row] < rows.num_slots, "a row begins with a slot outside the pools");
  }
  for (int64_t token = 0; token < rows.num_tokens(); token++) {
    require(rows.kept[token] < rows.num_slots, "a token keeps a slot outside the pools");
  }
  return rows;
}

const float* f32(const Any& buffer, int64_t elements, const char* message) {
  require(buffer.element_type() == ffi::F32 && int64_t(buffer.element_count()) == elements, message);
  return data<float>(buffer);
}

// Whether rows of tokens have a type and a width.
bool is_rows(const Any& buffer, ffi::DataType type, int64_t tokens, int64_t width) {
  return buffer.element_type() == type && dim(buffer, 0) >= tokens && dim(buffer, 1) == width;
}

template <class Call>
Convolution convolution(const Call& c, const Any& conv_bias) {
  Convolution conv{};
  conv.state = state_rows(c.query_starts, c.initial, c.kept, c.conv_pool, c.layer);
  conv.taps = dim(c.conv_weight, 0);
  conv.channels = dim(c.conv_weight, 1);
  conv.weight = f32(c.conv_weight, conv.taps * conv.channels, "conv_weight must be f32 [taps, C]");
  conv.bias = optional_f32(conv_bias);
  conv.pool = c.conv_out.untyped_data();
  require(conv.channels % kLanes == 0, "the number of channels must be a multiple of 16");
  require(conv.bias == nullptr || int64_t(conv_bias.element_count()) == conv.channels,
          "conv_bias must be f32 [C], or [0]");
  const bool is_bf16 = element_type(c.x) == DType::kBf16;
  require(c.conv_pool.element_type() == (is_bf16 ? ffi::U16 : ffi::F32) &&
              dim(c.conv_pool, 2) == conv.taps - 1 && dim(c.conv_pool, 3) == conv.channels,
          "conv_pool must be u16 beside bf16, or f32 beside f32, [slots, layers, taps - 1, C]");
  require(c.conv_out.untyped_data() == c.conv_pool.untyped_data(),
          "conv_pool must be donated and aliased to its result");
  return conv;
}

// The matrices of a layer's heads, whose slots and layers are those of its convolution.
StateMatrices state_matrices(const Any& pool, const Any& out, const StateRows& rows) {
  StateMatrices matrices{};
  matrices.pool = static_cast<float*>(out.untyped_data());
  matrices.heads = dim(pool, 2);
  matrices.values = dim(pool, 3) * kLanes;
  matrices.keys = dim(pool, 4);
  require(pool.element_type() == ffi::F32 && dim(pool, 0) == rows.num_slots &&
              dim(pool, 1) == rows.num_layers && dim(pool, 5) == kLanes,
          "state_pool must be f32 [slots, layers, heads, values / 16, keys, 16]");
  require(matrices.keys % kLanes == 0, "the number of keys must be a multiple of 16");
  require(out.untyped_data() == pool.untyped_data(),
          "state_pool must be donated and aliased to its result");
  return matrices;
}

// The bytes of the states of rows with tokens, and of `width` inputs of each token.
int64_t bytes_read(const StateRows& state, int64_t state_elements, int64_t width, DType dtype) {
  int64_t rows = 0;
  for (int64_t row = 0; row < state.rows; row++) rows += state.end(row) > state.begin(row);
  return rows * state_elements * int64_t(sizeof(float)) +
         state.num_tokens() * width * bytes_of(dtype);
}

}  // namespace

// Conventions of the layers with a state. Row r's tokens are [query_starts[r], query_starts[r + 1]); its
// state before them is that of slot initial[r], or zeros if that is negative. The state behind token t
// is written to slot kept[t], unless that is negative. conv_weight f32 [taps, C]; conv_bias f32 [C] or
// [0]; conv_pool act [slots, layers, taps - 1, C], bf16 as its bits in u16; state_pool f32 [slots,
// layers, heads, values / 16, keys, 16]. Pools must be donated and are results, too.

// cadenza_gated_delta: x act [T, C]; gate act [T, Hv Dv]; rates f32 [T, 2 Hv]; query_starts [R + 1];
// initial [R]; kept [T]; conv_weight; decay f32 [Hv]; decay_bias f32 [Hv]; norm_weight f32 [Dv];
// conv_pool; state_pool. Results act [T, Hv Dv], and both pools, which alias operands 10 and 11.
// Attributes: layer i64; key_heads i64; tiled bool; norm_eps f32. C is 2 Hk Dk + Hv Dv; GatedDeltaTask
// (core/tasks.h) has the arithmetic.
void execute(const calls::gated_delta& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.x);
  GatedDeltaTask task{};
  task.conv = convolution(c, absent());
  const StateRows& state = task.conv.state;
  task.matrices = state_matrices(c.state_pool, c.state_out, state);
  task.key_heads = c.key_heads;
  task.tiled = c.tiled;
  const int64_t heads = task.matrices.heads, tokens = state.num_tokens();
  const int64_t width = task.matrices.width();
  require(c.key_heads > 0 && heads % c.key_heads == 0,
          "the number of value heads must be a multiple of the number of key heads");
  require(task.conv.channels == task.num_channels(), "conv_weight must be [taps, 2 Hk Dk + Hv Dv]");
  require(is_rows(c.x, c.x.element_type(), tokens, task.conv.channels), "x must be act [T, C]");
  require(is_rows(c.gate, c.x.element_type(), tokens, width), "gate must have x's type, [T, Hv Dv]");
  require(is_rows(c.out, c.x.element_type(), tokens, width), "the result must have x's type, [T, Hv Dv]");
  require(is_rows(c.rates, ffi::F32, tokens, 2 * heads), "rates must be f32 [T, 2 Hv]");
  task.x = c.x.untyped_data();
  task.gate = c.gate.untyped_data();
  task.rates = data<float>(c.rates);
  task.decay = f32(c.decay, heads, "decay must be f32 [Hv]");
  task.decay_bias = f32(c.decay_bias, heads, "decay_bias must be f32 [Hv]");
  task.norm_weight = f32(c.norm_weight, task.matrices.values, "norm_weight must be f32 [Dv]");
  task.norm_eps = c.norm_eps;
  task.out = c.out.untyped_data();
  if (profile.is_on()) {
    const int64_t elements = heads * task.matrices.head_size();
    profile.reads(bytes_read(state, elements, task.conv.channels + width, dtype));
  }
  gated_delta(runtime(), dtype, task);
}

// cadenza_short_conv: x act [T, 3 C]: B, C and x of each token; query_starts [R + 1]; initial [R];
// kept [T]; conv_weight; conv_bias; conv_pool. Results act [T, C], and the pool, which aliases operand
// 6. Attribute: layer i64.
void execute(const calls::short_conv& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.x);
  ShortConvTask task{};
  task.conv = convolution(c, c.conv_bias);
  const int64_t tokens = task.conv.state.num_tokens(), channels = task.conv.channels;
  require(is_rows(c.x, c.x.element_type(), tokens, 3 * channels), "x must be act [T, 3 C]");
  require(is_rows(c.out, c.x.element_type(), tokens, channels), "the result must have x's type, [T, C]");
  task.x = c.x.untyped_data();
  task.out = c.out.untyped_data();
  if (profile.is_on()) profile.reads(bytes_read(task.conv.state, 0, 3 * channels, dtype));
  short_conv(runtime(), dtype, task);
}

// cadenza_selective_scan: x act [T, C]; gate act [T, H D]; rates f32 [T, H]; query_starts [R + 1];
// initial [R]; kept [T]; conv_weight; conv_bias; decay, rate_bias and skip f32 [H]; norm_weight f32
// [H D]; conv_pool; state_pool. Results act [T, H D], and both pools, which alias operands 12 and 13.
// Attributes: layer i64; groups i64; norm_eps f32. C is H D + 2 G N; SelectiveScanTask (core/tasks.h)
// has the arithmetic.
void execute(const calls::selective_scan& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.x);
  SelectiveScanTask task{};
  task.conv = convolution(c, c.conv_bias);
  const StateRows& state = task.conv.state;
  task.matrices = state_matrices(c.state_pool, c.state_out, state);
  task.groups = c.groups;
  const int64_t heads = task.matrices.heads, tokens = state.num_tokens();
  const int64_t width = task.matrices.width();
  require(c.groups > 0 && heads % c.groups == 0, "the number of heads must be a multiple of groups");
  require(task.conv.channels == task.num_channels(), "conv_weight must be [taps, H D + 2 G N]");
  require(is_rows(c.x, c.x.element_type(), tokens, task.conv.channels), "x must be act [T, C]");
  require(is_rows(c.gate, c.x.element_type(), tokens, width), "gate must have x's type, [T, H D]");
  require(is_rows(c.out, c.x.element_type(), tokens, width), "the result must have x's type, [T, H D]");
  require(is_rows(c.rates, ffi::F32, tokens, heads), "rates must be f32 [T, H]");
  task.x = c.x.untyped_data();
  task.gate = c.gate.untyped_data();
  task.rates = data<float>(c.rates);
  task.decay = f32(c.decay, heads, "decay must be f32 [H]");
  task.rate_bias = f32(c.rate_bias, heads, "rate_bias must be f32 [H]");
  task.skip = f32(c.skip, heads, "skip must be f32 [H]");
  task.norm_weight = f32(c.norm_weight, width, "norm_weight must be f32 [H D]");
  task.norm_eps = c.norm_eps;
  task.out = c.out.untyped_data();
  if (profile.is_on()) {
    const int64_t elements = heads * task.matrices.head_size();
    profile.reads(bytes_read(state, elements, task.conv.channels + width, dtype));
  }
  selective_scan(runtime(), dtype, task);
}

}  // namespace cadenza::xla_ffi
