// Operations as XLA calls them: embedding, norms, row gather and linear products. Conventions: csrc/README.md.
#include <algorithm>

#include "core/memory_pages.h"
#include "ffi/targets.h"

namespace cadenza::xla_ffi {

namespace {

bool is_f32(const Any& buffer) { return buffer.element_type() == ffi::F32; }

}  // namespace

// cadenza_embed: token_ids [T]; table, packed or act [V, E]; count. Result f32 [T, E], zeros for an
// id outside [0, V). Attributes: vocab i64; scale f32.
ffi::Error embed_call(Any token_ids, Any table, Any count, AnyResult out, int64_t vocab,
                      float scale) {
  return guarded("cadenza_embed", [&] {
    ProfileScope profile(Op::kEmbed);
    EmbedTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.width = dim(*out, 1);
    task.vocab = vocab;
    task.token_ids = int32(token_ids);
    task.table = table.untyped_data();
    WeightFormat format = weight_format(table);
    require(format != WeightFormat::kFloat8, "the embedding has no kernel for float8 weights");
    task.packed = is_quantised(format) || table.dimensions().size() > 2;
    task.scale = scale;
    task.out = static_cast<float*>(out->untyped_data());
    if (task.packed) require_packed(table, vocab, task.width);
    require(task.packed || (dim(table, 0) == vocab && dim(table, 1) == task.width),
            "the plain table must be [vocab, width]");
    require(is_f32(*out), "the result must be f32");
    if (profile.is_on()) profile.reads(task.rows * int64_t(table.size_bytes()) / std::max<int64_t>(vocab, 1));
    embed(runtime(), format, task);
  });
}

namespace {

// What is computed with the normed values.
struct Added {
  const Any* residual;
  const Any* factor;
};

void norm(Op op, Any x, Any weight, Any count, Added added, AnyResult out, float eps) {
  ProfileScope profile(op);
  NormTask task{};
  const int64_t width = dim(*out, 1);
  task.rows = true_count(count, dim(*out, 0));
  require(x.element_type() == ffi::F32 && dim(x, 1) == width, "x must be f32 [T, E]");
  require(dim(x, 0) >= task.rows, "x has too few rows");
  task.width = dim(weight, 0);
  require(task.width > 0 && width % task.width == 0,
          "the norm's weight must be f32 [E], or of parts of equal width");
  task.rows *= width / task.width;
  task.x = data<float>(x);
  task.weight = optional_f32(weight);
  task.eps = eps;
  task.residual = added.residual == nullptr ? nullptr : optional_f32(*added.residual);
  task.factor = added.factor == nullptr ? nullptr : optional_f32(*added.factor);
  task.out = out->untyped_data();
  task.out_is_f32 = is_f32(*out);
  if (profile.is_on()) {
    int64_t read_rows = task.residual == nullptr ? task.rows : 2 * task.rows;
    profile.reads((read_rows + 1) * task.width * int64_t(sizeof(float)));
  }
  rms_norm(runtime(), element_type(*out), task);
}

}  // namespace

// cadenza_rms_norm: x f32 [T, E]; weight f32 [E]; count. Result act or f32 [T, E]. Attribute: eps
// f32. A weight of P values norms each P of the E by themselves.
ffi::Error rms_norm_call(Any x, Any weight, Any count, AnyResult out, float eps) {
  return guarded("cadenza_rms_norm", [&] {
    norm(Op::kRmsNorm, x, weight, count, {}, out, eps);
  });
}

// cadenza_rms_norm_add: rms_norm with an operand 3, residual f32 [T, E] or [0], which is added to the
// normalised values, and an operand 4, factor f32 [1] or [0], which multiplies the sum. The result
// may alias the residual.
ffi::Error rms_norm_add_call(Any x, Any weight, Any count, Any residual, Any factor, AnyResult out,
                             float eps) {
  return guarded("cadenza_rms_norm_add", [&] {
    norm(Op::kRmsNormAdd, x, weight, count, {&residual, &factor}, out, eps);
  });
}

// cadenza_gate_inputs: x f32 [T, P]; inputs f32 [T, W]; count. Result act [T, P]: the activation
// with x as gate and the inputs [first, first + P) as what it multiplies. Attributes: first i64; activation as for gated_linear.
ffi::Error gate_inputs_call(Any x, Any inputs, Any count, AnyResult out, int64_t first,
                            int64_t activation) {
  return guarded("cadenza_gate_inputs", [&] {
    ProfileScope profile(Op::kGateInputs);
    GateTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.width = dim(*out, 1);
    task.input_width = dim(inputs, 1);
    task.first = first;
    require(is_f32(x) && is_f32(inputs) && dim(x, 1) == task.width, "x must be f32 [T, P]");
    require(dim(x, 0) >= task.rows && dim(inputs, 0) >= task.rows, "x or inputs have too few rows");
    require(first >= 0 && first + task.width <= task.input_width, "first is outside the inputs");
    require(activation >= 0 && activation < kNumActivations, "the activation is none of its kinds");
    task.activation = static_cast<Activation>(activation);
    task.x = data<float>(x);
    task.inputs = data<float>(inputs);
    task.out = out->untyped_data();
    if (profile.is_on()) profile.reads(2 * task.rows * task.width * int64_t(sizeof(float)));
    gate_inputs(runtime(), element_type(*out), task);
  });
}

// cadenza_convert: x f32 [T, N]; count. Result act [T, N].
ffi::Error convert_call(Any x, Any count, AnyResult out) {
  return guarded("cadenza_convert", [&] {
    ProfileScope profile(Op::kConvert);
    ConvertTask task{true_count(count, dim(*out, 0)), dim(*out, 1), nullptr, out->untyped_data()};
    require(is_f32(x) && dim(x, 1) == task.width, "x must be f32 [T, N]");
    require(dim(x, 0) >= task.rows, "x has too few rows");
    task.x = data<float>(x);
    if (profile.is_on()) profile.reads(task.rows * task.width * int64_t(sizeof(float)));
    convert(runtime(), element_type(*out), task);
  });
}

// cadenza_take_rows: x act or f32 [T, N]; count; indices [L]. Result x[indices] [L, N] in x's type,
// zeros for an index outside x.
ffi::Error take_rows_call(Any x, Any count, Any indices, AnyResult out) {
  return guarded("cadenza_take_rows", [&] {
    ProfileScope profile(Op::kTakeRows);
    require(out->element_type() == x.element_type() && dim(*out, 1) == dim(x, 1),
            "the result must have x's type and width");
    TakeTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.num_sources = dim(x, 0);
    task.row_bytes = dim(x, 1) * bytes_of(element_type(x));
    require(dim(indices, 0) >= task.rows, "there are too few indices");
    task.x = x.untyped_data();
    task.indices = int32(indices);
    task.out = out->untyped_data();
    if (profile.is_on()) profile.reads(task.rows * task.row_bytes);
    take_rows(task);
  });
}

// cadenza_reserve: result any array, whose content stays as it is; only its pages are placed.
ffi::Error reserve_call(AnyResult out) {
  return guarded("cadenza_reserve", [&] {
    place_pages(out->untyped_data(), out->size_bytes(), nodes_to_spread_over());
  });
}

// cadenza_linear: x act [T, K]; w packed; count; bias f32 [N] or [0]; residual f32 [T, N] or [0].
// Result act or f32 [T, N]: residual + scale · (x w + bias); it may alias the residual (operand 4).
// Attribute: scale f32.
ffi::Error linear_call(Any x, Any w, Any count, Any bias, Any residual, AnyResult out,
                       float scale) {
  return guarded("cadenza_linear", [&] {
    ProfileScope profile(Op::kLinear);
    ProductTypes types = product_types(x, w);
    DType dtype = types.activation;
    LinearTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.n = dim(*out, 1);
    task.k = dim(x, 1);
    require(dim(x, 0) >= task.rows, "x has too few rows");
    require_packed(w, task.n, task.k);
    require(is_f32(*out) || element_type(*out) == dtype, "the result must be f32 or x's type");
    task.x = x.untyped_data();
    task.w = w.untyped_data();
    task.bias = optional_f32(bias);
    require(task.bias == nullptr || dim(bias, 0) == task.n, "the bias must be f32 [N] or empty");
    task.residual = optional_f32(residual);
    task.scale = scale;
    task.out = out->untyped_data();
    task.out_is_f32 = is_f32(*out);
    if (profile.is_on()) {
      profile.reads(int64_t(w.size_bytes() + bias.size_bytes()));
      profile.reads(task.rows * task.k * bytes_of(dtype));
      if (task.residual != nullptr) profile.reads(task.rows * task.n * int64_t(sizeof(float)));
    }
    linear(runtime(), types, task);
  });
}

// cadenza_gated_linear: x act [T, K]; w packed gated; count; bias f32 [2, F] or [0]. Result act [T,
// F]: activation(x w_gate + bias_gate) · (x w_up + bias_up). Attribute: activation i64, 0 silu, 1
// gelu_tanh, 2 gelu, 3 clamped_swiglu, which bounds the second factor and adds 1 to it.
ffi::Error gated_linear_call(Any x, Any w, Any count, Any bias, AnyResult out, int64_t activation) {
  return guarded("cadenza_gated_linear", [&] {
    ProfileScope profile(Op::kGatedLinear);
    ProductTypes types = product_types(x, w);
    DType dtype = types.activation;
    require(activation >= 0 && activation < kNumActivations,
            "activation must be 0 (silu), 1 (gelu_tanh), 2 (gelu) or 3 (clamped_swiglu)");
    GatedTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.f = dim(*out, 1);
    task.k = dim(x, 1);
    require(dim(x, 0) >= task.rows, "x has too few rows");
    require_packed(w, 2 * round_up(task.f, kLanes), task.k);
    require(element_type(*out) == dtype, "the result must have x's type");
    task.x = x.untyped_data();
    task.w = w.untyped_data();
    task.bias = optional_f32(bias);
    require(task.bias == nullptr || int64_t(bias.element_count()) == 2 * task.f,
            "the bias must be f32 [2, F] or empty");
    task.activation = static_cast<Activation>(activation);
    task.out = out->untyped_data();
    if (profile.is_on()) {
      profile.reads(int64_t(w.size_bytes() + bias.size_bytes()));
      profile.reads(task.rows * task.k * bytes_of(dtype));
    }
    gated_linear(runtime(), types, task);
  });
}

}  // namespace cadenza::xla_ffi
