// Mixture of experts as XLA calls it. Conventions: csrc/README.md.
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

// Checks that the experts' packed weights are [X, panels, steps, 32, step]; returns X.
int64_t require_packed_experts(const Any& weight, int64_t columns, int64_t k) {
  require(is_packed(weight, 1, columns, k),
          "the experts' packed weights' shape does not fit their columns and reduction");
  require(dim(weight, 0) > 0, "there must be at least one expert");
  return dim(weight, 0);
}

ExpertChoice choice_of(const Any& ids, int64_t num_experts, int64_t rows) {
  require(dim(ids, 0) >= rows && dim(ids, 1) > 0, "ids must be int32 [T, C]");
  return {num_experts, dim(ids, 1), int32(ids)};
}

// Counts the weights and biases of the active experts, and x, as read once.
void count_reads(ProfileScope& profile, const Any& w, const Any& bias, const ExpertChoice& choice,
                 int64_t rows, int64_t x_bytes) {
  if (!profile.is_on()) return;
  int64_t every_expert = int64_t(w.size_bytes() + bias.size_bytes());
  profile.reads(every_expert / choice.num_experts * count_active_experts(choice, rows) + x_bytes);
}

}  // namespace

// cadenza_route_experts: x act [T, K]; w packed; count; bias f32 [X] or [0]; factors f32 [X] or [0],
// which multiply the weights of each expert; choice_bias f32 [X] or [0]. Results ids [T, C], weights
// f32 [T, C]. Attributes: experts i64 (X); over_chosen bool; sigmoid bool; groups i64; chosen_groups
// i64; scale f32; least_sum f32.
//
// Chooses the C largest logits (f32, bias included) of each row in descending order, ties to the
// lowest id. Weights are a softmax over all experts, or with sigmoid the sigmoids of their logits;
// with over_chosen they are divided by their sum over those C plus least_sum; times scale.
// A choice bias is added to the sigmoids by which experts are then chosen, in the chosen_groups of
// `groups` groups of consecutive experts whose two best have the largest sums.
// A row whose largest logit is NaN or infinite gets ids 0 to C - 1 and NaN weights.
void execute(const calls::route_experts& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  DType dtype = types.activation;
  RouteTask task{};
  LinearTask& product = task.product;
  product.rows = true_count(c.count, dim(c.ids, 0));
  product.n = c.experts;
  product.k = dim(c.x, 1);
  require(dim(c.x, 0) >= product.rows, "x has too few rows");
  require_packed(c.w, c.experts, product.k);
  product.x = c.x.untyped_data();
  product.w = c.w.untyped_data();
  product.bias = optional_f32(c.bias);
  require(product.bias == nullptr || dim(c.bias, 0) == c.experts,
          "the bias must be f32 [X] or empty");
  task.num_chosen = dim(c.ids, 1);
  require(task.num_chosen > 0 && task.num_chosen <= c.experts,
          "each row must choose at least one expert and at most all");
  require(c.ids.element_type() == ffi::S32 && c.weights.element_type() == ffi::F32 &&
              c.weights.dimensions() == c.ids.dimensions(),
          "the results must be ids int32 [T, C] and weights f32 [T, C]");
  task.factors = optional_f32(c.factors);
  require(task.factors == nullptr || dim(c.factors, 0) == c.experts,
          "the experts' factors must be f32 [X] or empty");
  task.over_chosen = c.over_chosen;
  task.sigmoid = c.sigmoid;
  task.least_sum = c.least_sum;
  task.choice = {optional_f32(c.choice_bias), c.groups, c.chosen_groups};
  require(task.choice.bias == nullptr || (c.sigmoid && dim(c.choice_bias, 0) == c.experts),
          "a choice bias must be f32 [X], beside sigmoids");
  require(c.groups > 0 && c.experts % c.groups == 0 && c.chosen_groups > 0 && c.chosen_groups <= c.groups,
          "groups must divide the experts, and those chosen be among them");
  task.scale = c.scale;
  task.ids = static_cast<int32_t*>(c.ids.untyped_data());
  task.weights = static_cast<float*>(c.weights.untyped_data());
  if (profile.is_on()) {
    profile.reads(int64_t(c.w.size_bytes() + c.bias.size_bytes()));
    profile.reads(product.rows * product.k * bytes_of(dtype));
  }
  route_experts(runtime(), types, task);
}

// cadenza_grouped_gated_linear: x act [T, K]; w packed gated experts; count; bias f32 [X, 2, F] or
// [0]; ids [T, C]. Result act [T, C, F]; the slot of an id outside [0, X) is not written.
// Attribute: activation as for gated_linear.
void execute(const calls::grouped_gated_linear& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  DType dtype = types.activation;
  require(c.activation >= 0 && c.activation < kNumActivations,
          "activation must be 0 (silu), 1 (gelu_tanh), 2 (gelu) or 3 (clamped_swiglu)");
  GatedTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.f = dim(c.out, 2);
  task.k = dim(c.x, 1);
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  int64_t experts = require_packed_experts(c.w, 2 * round_up(task.f, kLanes), task.k);
  ExpertChoice choice = choice_of(c.ids, experts, task.rows);
  require(element_type(c.out) == dtype && dim(c.out, 1) == choice.num_chosen,
          "the result must be [T, C, F] of x's type");
  task.x = c.x.untyped_data();
  task.w = c.w.untyped_data();
  task.bias = optional_f32(c.bias);
  require(task.bias == nullptr || int64_t(c.bias.element_count()) == experts * 2 * task.f,
          "the bias must be f32 [X, 2, F] or empty");
  task.activation = static_cast<Activation>(c.activation);
  task.out = c.out.untyped_data();
  count_reads(profile, c.w, c.bias, choice, task.rows, task.rows * task.k * bytes_of(dtype));
  grouped_gated_linear(runtime(), types, {task, choice});
}

// cadenza_grouped_linear: x act [T, C, K]; w packed experts; count; bias f32 [X, N] or [0];
// residual f32 [T, N] or [0]; ids [T, C]; weights f32 [T, C]. Result act or f32 [T, N]: residual +
// the sum over a token's slots of weight · (x w + bias), where an id outside [0, X) adds nothing;
// it may alias the residual (operand 4).
void execute(const calls::grouped_linear& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  DType dtype = types.activation;
  LinearTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.n = dim(c.out, 1);
  task.k = dim(c.x, 2);
  int64_t experts = require_packed_experts(c.w, task.n, task.k);
  ExpertChoice choice = choice_of(c.ids, experts, task.rows);
  require(dim(c.x, 0) >= task.rows && dim(c.x, 1) == choice.num_chosen, "x must be [T, C, K]");
  require(c.weights.element_type() == ffi::F32 && c.weights.dimensions() == c.ids.dimensions(),
          "the experts' weights must be f32 [T, C]");
  task.x = c.x.untyped_data();
  task.w = c.w.untyped_data();
  task.bias = optional_f32(c.bias);
  require(task.bias == nullptr || int64_t(c.bias.element_count()) == experts * task.n,
          "the bias must be f32 [X, N] or empty");
  task.residual = optional_f32(c.residual);
  require(
      task.residual == nullptr || (dim(c.residual, 0) >= task.rows && dim(c.residual, 1) == task.n),
      "the residual must be f32 [T, N] or empty");
  task.out_is_f32 = c.out.element_type() == ffi::F32;
  require(element_type(c.out) == dtype || task.out_is_f32, "the result must be f32 or x's type");
  task.out = c.out.untyped_data();
  int64_t x_bytes = choice.num_pairs(task.rows) * task.k * bytes_of(dtype);
  count_reads(profile, c.w, c.bias, choice, task.rows, x_bytes);
  grouped_linear(runtime(), types, {task, choice, data<float>(c.weights)});
}

// cadenza_head_linear: x act [T, Hq D]; w packed weights [Hq, ...] of N columns; count. Result act
// [T, Hq N]: the first `width` elements of each head's part of x, multiplied by the head's weight.
// Attribute: width i64.
void execute(const calls::head_linear& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.w);
  HeadLinearTask task{};
  task.heads = dim(c.w, 0);
  require(task.heads > 0 && dim(c.x, 1) % task.heads == 0 && dim(c.out, 1) % task.heads == 0,
          "x must be [T, Hq D] and the result [T, Hq N]");
  task.rows = true_count(c.count, dim(c.out, 0));
  task.n = dim(c.out, 1) / task.heads;
  task.k = c.width;
  task.stride = dim(c.x, 1) / task.heads;
  require(dim(c.x, 0) >= task.rows, "x has too few rows");
  require(c.width > 0 && c.width <= task.stride, "the width must be within a head's part of x");
  require_packed_experts(c.w, task.n, task.k);
  require(element_type(c.out) == types.activation, "the result must have x's type");
  task.x = c.x.untyped_data();
  task.w = c.w.untyped_data();
  task.out = c.out.untyped_data();
  if (profile.is_on()) {
    profile.reads(int64_t(c.w.size_bytes()));
    profile.reads(task.rows * dim(c.x, 1) * bytes_of(types.activation));
  }
  head_linear(runtime(), types, task);
}

}  // namespace cadenza::xla_ffi
