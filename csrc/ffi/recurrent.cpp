// Layers with a state as XLA calls them; they update the donated pools in place. Conventions: csrc/README.md.
#include "ffi/targets.h"

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

struct GatedDeltaBuffers {
  Any x, gate, rates, query_starts, initial, kept, conv_weight, decay, decay_bias, norm_weight,
      conv_pool, state_pool, out, conv_out, state_out;
};

GatedDeltaTask gated_delta_task(const GatedDeltaBuffers& b, int64_t layer, int64_t key_heads,
                                bool tiled) {
  GatedDeltaTask task{};
  task.state = state_rows(b.query_starts, b.initial, b.kept, b.state_pool, layer);
  task.key_heads = key_heads;
  task.tiled = tiled;
  task.value_heads = dim(b.state_pool, 2);
  task.value_size = dim(b.state_pool, 3) * kLanes;
  task.key_size = dim(b.state_pool, 4);
  task.taps = dim(b.conv_weight, 0);
  require(key_heads > 0 && task.value_heads % key_heads == 0,
          "the number of value heads must be a multiple of the number of key heads");
  require(task.key_size % kLanes == 0, "the key size must be a multiple of 16");
  task.x = b.x.untyped_data();
  task.gate = b.gate.untyped_data();
  task.rates = data<float>(b.rates);
  task.conv_weight = f32(b.conv_weight, task.taps * task.channels(), "conv_weight must be f32 [taps, C]");
  task.decay = f32(b.decay, task.value_heads, "decay must be f32 [Hv]");
  task.decay_bias = f32(b.decay_bias, task.value_heads, "decay_bias must be f32 [Hv]");
  task.norm_weight = f32(b.norm_weight, task.value_size, "norm_weight must be f32 [Dv]");
  task.conv_pool = b.conv_out.untyped_data();
  task.state_pool = static_cast<float*>(b.state_out.untyped_data());
  task.out = b.out.untyped_data();
  return task;
}

// Whether rows of tokens have a type and a width.
bool is_rows(const Any& buffer, ffi::DataType type, int64_t tokens, int64_t width) {
  return buffer.element_type() == type && dim(buffer, 0) >= tokens && dim(buffer, 1) == width;
}

void check(const GatedDeltaBuffers& b, const GatedDeltaTask& task, DType dtype) {
  const ffi::DataType act = b.x.element_type();
  const int64_t tokens = task.state.num_tokens();
  require(is_rows(b.x, act, tokens, task.channels()), "x must be act [T, 2 Hk Dk + Hv Dv]");
  require(is_rows(b.gate, act, tokens, task.value_width()), "gate must have x's type, [T, Hv Dv]");
  require(is_rows(b.out, act, tokens, task.value_width()), "the result must have x's type, [T, Hv Dv]");
  require(is_rows(b.rates, ffi::F32, tokens, 2 * task.value_heads), "rates must be f32 [T, 2 Hv]");
  require(b.state_pool.element_type() == ffi::F32 && dim(b.state_pool, 5) == kLanes,
          "state_pool must be f32 [slots, layers, Hv, Dv / 16, Dk, 16]");
  require(b.conv_pool.element_type() == (dtype == DType::kBf16 ? ffi::U16 : ffi::F32) &&
              dim(b.conv_pool, 0) == task.state.num_slots &&
              dim(b.conv_pool, 1) == task.state.num_layers &&
              dim(b.conv_pool, 2) == task.taps - 1 && dim(b.conv_pool, 3) == task.channels(),
          "conv_pool must be u16 beside bf16, or f32 beside f32, [slots, layers, taps - 1, C]");
  require(b.conv_out.untyped_data() == b.conv_pool.untyped_data() &&
              b.state_out.untyped_data() == b.state_pool.untyped_data(),
          "conv_pool and state_pool must be donated and aliased to the results");
}

// The states of rows with tokens, and the inputs of the tokens.
int64_t bytes_read(const GatedDeltaTask& task, DType dtype) {
  int64_t rows = 0;
  for (int64_t row = 0; row < task.state.rows; row++) {
    rows += task.state.end(row) > task.state.begin(row);
  }
  const int64_t states = rows * task.value_heads * task.head_state() * int64_t(sizeof(float));
  const int64_t width = task.channels() + task.value_width();
  return states + task.state.num_tokens() * width * bytes_of(dtype);
}

}  // namespace

// cadenza_gated_delta: x act [T, C]; gate act [T, Hv Dv]; rates f32 [T, 2 Hv]; query_starts [R + 1];
// initial [R]; kept [T]; conv_weight f32 [taps, C]; decay f32 [Hv]; decay_bias f32 [Hv]; norm_weight
// f32 [Dv]; conv_pool act [slots, layers, taps - 1, C], bf16 as its bits in u16; state_pool f32
// [slots, layers, Hv, Dv / 16, Dk, 16]. Results act [T, Hv Dv], and both pools, which must be donated
// and alias operands 10 and 11. Attributes: layer i64; key_heads i64; tiled bool; norm_eps
// f32.
//
// C is 2 Hk Dk + Hv Dv, and the arithmetic that of GatedDeltaTask (core/tasks.h). Row r's tokens are
// [query_starts[r], query_starts[r + 1]); its state before them is that of slot initial[r], or zeros if
// that is negative. The state behind token t is written to slot kept[t], unless that is negative.
ffi::Error gated_delta_call(Any x, Any gate, Any rates, Any query_starts, Any initial, Any kept,
                            Any conv_weight, Any decay, Any decay_bias, Any norm_weight,
                            Any conv_pool, Any state_pool, AnyResult out, AnyResult conv_out,
                            AnyResult state_out, int64_t layer, int64_t key_heads,
                            bool tiled, float norm_eps) {
  return guarded("cadenza_gated_delta", [&] {
    ProfileScope profile(Op::kGatedDelta);
    const GatedDeltaBuffers buffers{x,          gate,      rates,      query_starts, initial,
                                    kept,       conv_weight, decay,    decay_bias,   norm_weight,
                                    conv_pool,  state_pool, *out,      *conv_out,    *state_out};
    const DType dtype = element_type(x);
    GatedDeltaTask task = gated_delta_task(buffers, layer, key_heads, tiled);
    task.norm_eps = norm_eps;
    check(buffers, task, dtype);
    if (profile.is_on()) profile.reads(bytes_read(task, dtype));
    gated_delta(runtime(), dtype, task);
  });
}

}  // namespace cadenza::xla_ffi
