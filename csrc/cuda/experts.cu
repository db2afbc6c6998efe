// Mixture of experts: the operations of routing and of products whose rows are grouped by expert.
#include "cuda/bodies.h"
#include "cuda/elements.h"
#include "cuda/epilogue.h"
#include "cuda/grouped_product.h"
#include "cuda/routing.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 128;

// A row's outputs of its experts [C, N], their weights and where the sum goes.
struct Combination {
  const float* partials;
  const float* weights;
  ChosenExperts chosen;
  Epilogue epilogue;
};

// An element's sum is over the slots in ascending order.
__global__ void __launch_bounds__(kThreads) combine_kernel(Combination combination) {
  const int64_t row = blockIdx.x, columns = combination.epilogue.columns;
  const int64_t column = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  const ChosenExperts& chosen = combination.chosen;
  if (row >= *chosen.count || column >= columns) return;
  float sum = 0.0f;
  for (int64_t pair = row * chosen.chosen; pair < (row + 1) * chosen.chosen; pair++) {
    if (chosen.ids[pair] < 0 || chosen.ids[pair] >= chosen.experts) continue;
    sum = fmaf(combination.weights[pair], combination.partials[pair * columns + column], sum);
  }
  combination.epilogue.finish(row, column, sum);
}

}  // namespace

// out = residual + the weighted sum of the experts' outputs for each row of x [rows, chosen, K].
void weighted_product(ProductTask task, const ChosenExperts& chosen, const float* weights) {
  Workspace workspace;
  Epilogue epilogue = epilogue_of(task);
  epilogue.bias = nullptr;  // already in the experts' outputs
  auto* partials = workspace.take<float>(chosen.num_pairs() * task.n);
  task.residual = nullptr;
  task.out = partials;
  task.out_is_f32 = true;
  product_of_experts(task, chosen, 1, workspace);
  const dim3 grid{unsigned(chosen.rows), unsigned(ceil_div(task.n, kThreads))};
  launch(combine_kernel, grid, kThreads, 0, Combination{partials, weights, chosen, epilogue});
}

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::ChosenExperts;
using cuda::ProductTask;

ChosenExperts chosen_of(const Any& ids, const Any& w, const Any& count, int64_t padded) {
  const int64_t rows = cuda::rows_to_compute(padded);
  require(dim(ids, 0) >= rows && dim(ids, 1) > 0, "ids must be int32 [T, C]");
  require(dim(w, 0) > 0 && dim(w, 0) <= cuda::kMostExperts, "there must be 1 to 1024 experts");
  return {int32(ids), rows, dim(ids, 1), dim(w, 0), device_count(count)};
}

// The product of the pairs, each with its expert's weight [N, K]; the caller adds what follows.
ProductTask task_of(const Any& x, const Any& w, const ChosenExperts& chosen, int64_t n, int64_t k) {
  ProductTask task{};
  task.rows = chosen.rows;
  task.n = n;
  task.k = k;
  task.x = x.untyped_data();
  task.x_type = product_types(x, w).activation;
  task.w = weight_of(w);
  require(dim(x, 0) >= chosen.rows, "x has too few rows");
  require(cuda::fits(task.w, 1, n, k), "the experts' weights do not fit their columns and reduction");
  task.w.shape++;
  task.w.rank--;
  task.count = chosen.count;
  return task;
}

// The router's product, whose logits are in the workspace.
const float* logits_of(const Any& x, const Any& w, const Any& bias, const cuda::Routing& routing,
                       cuda::Workspace& workspace) {
  ProductTask task{};
  task.rows = routing.rows;
  task.n = routing.experts;
  task.k = dim(x, 1);
  task.x = x.untyped_data();
  task.x_type = product_types(x, w).activation;
  task.w = weight_of(w);
  require(dim(x, 0) >= task.rows, "x has too few rows");
  require(cuda::fits(task.w, 0, task.n, task.k), "the router's weight does not fit its columns and reduction");
  task.bias = optional_f32(bias);
  require(bias.element_count() == 0 || dim(bias, 0) == task.n, "the bias must be f32 [X] or empty");
  task.count = routing.count;
  auto* logits = workspace.take<float>(task.rows * task.n);
  task.out = logits;
  task.out_is_f32 = true;
  cuda::product(task, workspace);
  return logits;
}

}  // namespace

void execute(const calls::route_experts& c) {
  const int64_t chosen = dim(c.ids, 1);
  require(c.experts > 0 && c.experts <= cuda::kMostExperts, "there must be 1 to 1024 experts");
  require(chosen > 0 && chosen <= c.experts, "each row must choose at least one expert and at most all");
  require(c.ids.element_type() == ffi::S32 && c.weights.element_type() == ffi::F32 &&
              c.weights.dimensions() == c.ids.dimensions(),
          "the results must be ids int32 [T, C] and weights f32 [T, C]");
  require(c.factors.element_count() == 0 || dim(c.factors, 0) == c.experts,
          "the experts' factors must be f32 [X] or empty");
  require(c.choice_bias.element_count() == 0 || (c.sigmoid && dim(c.choice_bias, 0) == c.experts),
          "a choice bias must be f32 [X], beside sigmoids");
  require(c.groups > 0 && c.experts % c.groups == 0 && c.chosen_groups > 0 && c.chosen_groups <= c.groups,
          "groups must divide the experts, and those chosen be among them");
  cuda::Routing routing{nullptr, device_count(c.count), cuda::rows_to_compute(dim(c.ids, 0)),
                        int(c.experts), int(chosen), c.over_chosen, c.sigmoid,
                        {optional_f32(c.choice_bias), c.groups, c.chosen_groups},
                        c.scale, c.least_sum, optional_f32(c.factors),
                        static_cast<int32_t*>(c.ids.untyped_data()),
                        static_cast<float*>(c.weights.untyped_data())};
  cuda::Workspace workspace;
  routing.logits = logits_of(c.x, c.w, c.bias, routing, workspace);
  cuda::route(routing);
}

void execute(const calls::grouped_gated_linear& c) {
  require(c.activation >= 0 && c.activation < kNumActivations,
          "activation must be 0 (silu), 1 (gelu_tanh), 2 (gelu) or 3 (clamped_swiglu)");
  const ChosenExperts chosen = chosen_of(c.ids, c.w, c.count, dim(c.out, 0));
  ProductTask task = task_of(c.x, c.w, chosen, 2 * dim(c.out, 2), dim(c.x, 1));
  require(element_type(c.out) == task.x_type && dim(c.out, 1) == chosen.chosen,
          "the result must be [T, C, F] of x's type");
  task.out_is_f32 = task.x_type == DType::kF32;
  task.bias = optional_f32(c.bias);
  require(c.bias.element_count() == 0 || int64_t(c.bias.element_count()) == chosen.experts * task.n,
          "the bias must be f32 [X, 2, F] or empty");
  task.is_gated = true;
  task.activation = static_cast<Activation>(c.activation);
  task.out = c.out.untyped_data();
  cuda::Workspace workspace;
  cuda::product_of_experts(task, chosen, chosen.chosen, workspace);
}

void execute(const calls::grouped_linear& c) {
  const ChosenExperts chosen = chosen_of(c.ids, c.w, c.count, dim(c.out, 0));
  ProductTask task = task_of(c.x, c.w, chosen, dim(c.out, 1), dim(c.x, 2));
  require(dim(c.x, 1) == chosen.chosen, "x must be [T, C, K]");
  require(c.weights.element_type() == ffi::F32 && c.weights.dimensions() == c.ids.dimensions(),
          "the experts' weights must be f32 [T, C]");
  task.bias = optional_f32(c.bias);
  require(c.bias.element_count() == 0 || int64_t(c.bias.element_count()) == chosen.experts * task.n,
          "the bias must be f32 [X, N] or empty");
  task.residual = optional_f32(c.residual);
  require(c.residual.element_count() == 0 ||
              (dim(c.residual, 0) >= chosen.rows && dim(c.residual, 1) == task.n),
          "the residual must be f32 [T, N] or empty");
  task.out_is_f32 = c.out.element_type() == ffi::F32;
  require(task.out_is_f32 || element_type(c.out) == task.x_type, "the result must be f32 or x's type");
  task.out = c.out.untyped_data();
  cuda::weighted_product(task, chosen, data<float>(c.weights));
}

}  // namespace cadenza::xla_ffi
