// Operations as XLA calls them: embedding, norms, row gather and linear products. Conventions: csrc/README.md.
#include <algorithm>

#include "core/memory_pages.h"
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

bool is_f32(const Any& buffer) { return buffer.element_type() == ffi::F32; }

}  // namespace

// cadenza_embed: token_ids [T]; table, packed or act [V, E]; count. Result f32 [T, E], zeros for an
// id outside [0, V). Attributes: vocab i64; scale f32.
void execute(const calls::embed& c) {
  ProfileScope profile(c.kOp);
  EmbedTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.width = dim(c.out, 1);
  task.vocab = c.vocab;
  task.token_ids = int32(c.token_ids);
  task.table = c.table.untyped_data();
  WeightFormat format = weight_format(c.table);
  require(format != WeightFormat::kFloat8, "the embedding has no kernel for float8 weights");
  task.packed = is_quantised(format) || c.table.dimensions().size() > 2;
  task.scale = c.scale;
  task.out = static_cast<float*>(c.out.untyped_data());
  if (task.packed) require_packed(c.table, c.vocab, task.width);
  require(task.packed || (dim(c.table, 0) == c.vocab && dim(c.table, 1) == task.width),
          "the plain table must be [vocab, width]");
  require(is_f32(c.out), "the result must be f32");
  if (profile.is_on()) profile.reads(task.rows * int64_t(c.table.size_bytes()) / std::max<int64_t>(c.vocab, 1));
  embed(runtime(), format, task);
}

namespace {

// `residual` and `factor` are null where nothing is computed with the normed values.
template <class Call>
void norm(const Call& c, const Any* residual, const Any* factor) {
  ProfileScope profile(c.kOp);
  NormTask task{};
  const int64_t width = dim(c.out, 1);
  task.rows = true_count(c.count, dim(c.out, 0));
  require(c.x.element_type() == ffi::F32 && dim(c.x, 1) == width, "x must be f32 [T, E]");
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  task.width = dim(c.weight, 0);
  require(task.width > 0 && width % task.width == 0,
          "the norm's weight must be f32 [E], or of parts of equal width");
  task.rows *= width / task.width;
  task.x = data<float>(c.x);
  task.weight = optional_f32(c.weight);
  task.eps = c.eps;
  task.residual = residual == nullptr ? nullptr : optional_f32(*residual);
  task.factor = factor == nullptr ? nullptr : optional_f32(*factor);
  task.out = c.out.untyped_data();
  task.out_is_f32 = is_f32(c.out);
  if (profile.is_on()) {
    int64_t read_rows = task.residual == nullptr ? task.rows : 2 * task.rows;
    profile.reads((read_rows + 1) * task.width * int64_t(sizeof(float)));
  }
  rms_norm(runtime(), element_type(c.out), task);
}

}  // namespace

// cadenza_rms_norm: x f32 [T, E]; weight f32 [E]; count. Result act or f32 [T, E]. Attribute: eps
// f32. A weight of P values norms each P of the E by themselves.
void execute(const calls::rms_norm& c) { norm(c, nullptr, nullptr); }

// cadenza_rms_norm_add: rms_norm with an operand 3, residual f32 [T, E] or [0], which is added to the
// normalised values, and an operand 4, factor f32 [1] or [0], which multiplies the sum. The result
// may alias the residual.
void execute(const calls::rms_norm_add& c) { norm(c, &c.residual, &c.factor); }

// cadenza_gate_inputs: x f32 [T, P]; inputs f32 [T, W]; count. Result act [T, P]: the activation
// with x as gate and the inputs [first, first + P) as what it multiplies. Attributes: first i64;
// activation as for gated_linear.
void execute(const calls::gate_inputs& c) {
  ProfileScope profile(c.kOp);
  GateTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.width = dim(c.out, 1);
  task.input_width = dim(c.inputs, 1);
  task.first = c.first;
  require(is_f32(c.x) && is_f32(c.inputs) && dim(c.x, 1) == task.width, "x must be f32 [T, P]");
  require(dim(c.x, 0) >= task.rows && dim(c.inputs, 0) >= task.rows, "x or inputs have too few rows");
  require(c.first >= 0 && c.first + task.width <= task.input_width, "first is outside the inputs");
  require(c.activation >= 0 && c.activation < kNumActivations, "the activation is none of its kinds");
  task.activation = static_cast<Activation>(c.activation);
  task.x = data<float>(c.x);
  task.inputs = data<float>(c.inputs);
  task.out = c.out.untyped_data();
  if (profile.is_on()) profile.reads(2 * task.rows * task.width * int64_t(sizeof(float)));
  gate_inputs(runtime(), element_type(c.out), task);
}

// cadenza_convert: x f32 [T, N]; count. Result act [T, N].
void execute(const calls::convert& c) {
  ProfileScope profile(c.kOp);
  ConvertTask task{true_count(c.count, dim(c.out, 0)), dim(c.out, 1), nullptr, c.out.untyped_data()};
  require(is_f32(c.x) && dim(c.x, 1) == task.width, "x must be f32 [T, N]");
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  task.x = data<float>(c.x);
  if (profile.is_on()) profile.reads(task.rows * task.width * int64_t(sizeof(float)));
  convert(runtime(), element_type(c.out), task);
}

// cadenza_take_rows: x act or f32 [T, N]; count; indices [L]. Result x[indices] [L, N] in x's type,
// zeros for an index outside x.
void execute(const calls::take_rows& c) {
  ProfileScope profile(c.kOp);
  require(c.out.element_type() == c.x.element_type() && dim(c.out, 1) == dim(c.x, 1),
          "the result must have x's type and width");
  TakeTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.num_sources = dim(c.x, 0);
  task.row_bytes = dim(c.x, 1) * bytes_of(element_type(c.x));
  require(dim(c.indices, 0) >= task.rows, "there are too few indices");
  task.x = c.x.untyped_data();
  task.indices = int32(c.indices);
  task.out = c.out.untyped_data();
  if (profile.is_on()) profile.reads(task.rows * task.row_bytes);
  take_rows(task);
}

// cadenza_reserve: result any array, whose content stays as it is; only its pages are placed.
void execute(const calls::reserve& c) {
  ProfileScope profile(c.kOp);
  place_pages(c.out.untyped_data(), c.out.size_bytes(), nodes_to_spread_over());
}

// cadenza_linear: x act [T, K]; w packed; count; bias f32 [N] or [0]; residual f32 [T, N] or [0].
// Result act or f32 [T, N]: residual + scale · (x w + bias); it may alias the residual (operand 4).
// Attribute: scale f32.
void execute(const calls::linear& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  DType dtype = types.activation;
  LinearTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.n = dim(c.out, 1);
  task.k = dim(c.x, 1);
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  require_packed(c.w, task.n, task.k);
  require(is_f32(c.out) || element_type(c.out) == dtype, "the result must be f32 or x's type");
  task.x = c.x.untyped_data();
  task.w = c.w.untyped_data();
  task.bias = optional_f32(c.bias);
  require(task.bias == nullptr || dim(c.bias, 0) == task.n, "the bias must be f32 [N] or empty");
  task.residual = optional_f32(c.residual);
  task.scale = c.scale;
  task.out = c.out.untyped_data();
  task.out_is_f32 = is_f32(c.out);
  if (profile.is_on()) {
    profile.reads(int64_t(c.w.size_bytes() + c.bias.size_bytes()));
    profile.reads(task.rows * task.k * bytes_of(dtype));
    if (task.residual != nullptr) profile.reads(task.rows * task.n * int64_t(sizeof(float)));
  }
  linear(runtime(), types, task);
}

// cadenza_gated_linear: x act [T, K]; w packed gated; count; bias f32 [2, F] or [0]. Result act [T,
// F]: activation(x w_gate + bias_gate) · (x w_up + bias_up). Attribute: activation i64, 0 silu, 1
// gelu_tanh, 2 gelu, 3 clamped_swiglu, which bounds the second factor and adds 1 to it.
void execute(const calls::gated_linear& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  DType dtype = types.activation;
  require(c.activation >= 0 && c.activation < kNumActivations,
          "activation must be 0 (silu), 1 (gelu_tanh), 2 (gelu) or 3 (clamped_swiglu)");
  GatedTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.f = dim(c.out, 1);
  task.k = dim(c.x, 1);
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  require_packed(c.w, 2 * round_up(task.f, kLanes), task.k);
  require(element_type(c.out) == dtype, "the result must have x's type");
  task.x = c.x.untyped_data();
  task.w = c.w.untyped_data();
  task.bias = optional_f32(c.bias);
  require(task.bias == nullptr || int64_t(c.bias.element_count()) == 2 * task.f,
          "the bias must be f32 [2, F] or empty");
  task.activation = static_cast<Activation>(c.activation);
  task.out = c.out.untyped_data();
  if (profile.is_on()) {
    profile.reads(int64_t(c.w.size_bytes() + c.bias.size_bytes()));
    profile.reads(task.rows * task.k * bytes_of(dtype));
  }
  gated_linear(runtime(), types, task);
}

}  // namespace cadenza::xla_ffi
