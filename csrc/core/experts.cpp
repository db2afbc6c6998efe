// Mixture of experts: groups rows by expert and partitions the products into units. And products
// with a weight for each head, whose groups have all rows.
#include <cstring>

#include "core/partition.h"
#include "core/ops.h"
#include "core/quantised.h"

namespace cadenza {

namespace {

// Maximum partial results (floats) of a block of panels, so that they stay in the caches until they
// are combined. With few rows all panels are one block, so that each expert's weight is read in one
// run.
constexpr int64_t kMaxPartials = 1 << 19;
constexpr int64_t kMinParallelBytes = 1 << 18;

// The pairs of all active experts, grouped by expert; ascending within a group.
struct Sorted {
  ExpertGroup* groups;
  int64_t num_groups, num_pairs;
  int32_t* pairs;
};

Sorted sort_by_expert(const ExpertChoice& choice, int64_t rows, Arena& scratch) {
  const int64_t pairs = choice.num_pairs(rows), experts = choice.num_experts;
  int64_t* next = scratch.take<int64_t>(experts + 1);
  std::fill(next, next + experts + 1, 0);
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (choice.has_expert(pair)) next[choice.ids[pair] + 1]++;
  }
  Sorted sorted{scratch.take<ExpertGroup>(std::min(pairs, experts)), 0, 0,
                scratch.take<int32_t>(pairs)};
  for (int64_t expert = 0; expert < experts; expert++) {
    const int64_t count = next[expert + 1];
    if (count > 0) sorted.groups[sorted.num_groups++] = {expert, sorted.num_pairs, count, 0, {}};
    next[expert] = sorted.num_pairs;
    sorted.num_pairs += count;
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (choice.has_expert(pair)) sorted.pairs[next[choice.ids[pair]]++] = int32_t(pair);
  }
  return sorted;
}

struct GatherTask {
  const char* x;
  const int32_t* pairs;
  int64_t pairs_per_row;  // pairs that share a row of x
  size_t row_bytes;
  char* out;
};

void gather_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const GatherTask*>(context);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = task.pairs[i] / task.pairs_per_row;
    std::memcpy(task.out + size_t(i) * task.row_bytes, task.x + size_t(row) * task.row_bytes,
                task.row_bytes);
  }
}

// Copies rows of x into the order of `sorted.pairs`; each row is used by `pairs_per_row` pairs.
const void* gather(Executor::Lease& lease, const Sorted& sorted, const void* x,
                   int64_t pairs_per_row, int64_t row_bytes) {
  char* out = lease.scratch().take<char>(sorted.num_pairs * row_bytes);
  GatherTask task{static_cast<const char*>(x), sorted.pairs, pairs_per_row, size_t(row_bytes), out};
  lease.run({gather_units, &task, sorted.num_pairs, 16},
            sorted.num_pairs * row_bytes > kMinParallelBytes);
  return out;
}

// The orders of the inputs of the sorted pairs, which those of their experts' weights have.
const int32_t* const* orders_of_pairs(Arena& scratch, const Sorted& sorted, const void* w) {
  const int64_t weight_bytes = codes_header(w).num_bytes();
  auto** orders = scratch.take<const int32_t*>(sorted.num_pairs);
  for (int64_t g = 0; g < sorted.num_groups; g++) {
    const ExpertGroup& group = sorted.groups[g];
    const void* weight = static_cast<const char*>(w) + group.expert * weight_bytes;
    std::fill(orders + group.first, orders + group.first + group.rows, input_order(weight));
  }
  return orders;
}

struct HeadGather {
  const HeadLinearTask* task;
  size_t element_bytes;
  char* out;
};

// Unit i is row i % rows of head i / rows.
void gather_head_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& gather = *static_cast<const HeadGather*>(context);
  const HeadLinearTask& task = *gather.task;
  const size_t bytes = size_t(task.k) * gather.element_bytes;
  for (int64_t i = begin; i < end; i++) {
    const int64_t place = (i % task.rows * task.heads + i / task.rows) * task.stride;
    std::memcpy(gather.out + size_t(i) * bytes,
                static_cast<const char*>(task.x) + size_t(place) * gather.element_bytes, bytes);
  }
}

// The rows of each head, one head after the other.
const void* gather_heads(Executor::Lease& lease, ProductTypes types, const HeadLinearTask& task) {
  const int64_t row_bytes = activation_row_bytes(types, task.k), num_rows = task.heads * task.rows;
  char* out = lease.scratch().take<char>(num_rows * row_bytes);
  HeadGather context{&task, size_t(row_bytes / task.k), out};
  lease.run({gather_head_units, &context, num_rows, 16}, num_rows * row_bytes > kMinParallelBytes);
  return out;
}

// The rows of x in the order of `sorted.pairs`, as the products read them. Each row is quantised once,
// unless experts read its elements in orders of their own.
const void* gathered_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                          const Sorted& sorted, const ProductInput& input, int64_t pairs_per_row) {
  if (!is_quantised(types.weight) || input_order(input.w) == nullptr) {
    const void* rows = product_rows(runtime, lease, types, input);
    return gather(lease, sorted, rows, pairs_per_row, product_row_bytes(types, input.k));
  }
  const void* rows =
      gather(lease, sorted, input.x, pairs_per_row, activation_row_bytes(types, input.k));
  return quantise_rows(runtime, lease, types,
                       {sorted.num_pairs, input.k, rows, nullptr,
                        orders_of_pairs(lease.scratch(), sorted, input.w)});
}

}  // namespace

void route_experts(const Runtime& runtime, ProductTypes types, const RouteTask& task) {
  const int64_t rows = task.product.rows, experts = task.product.n;
  if (rows == 0) return;
  Executor::Lease lease(runtime.executor);
  LinearTask product = task.product;
  float* logits = lease.scratch().take<float>(rows * experts);
  product.out = logits;
  product.out_is_f32 = true;
  product.x = product_rows(runtime, lease, types, {rows, product.k, product.x, product.w});
  const ProductKernels kernels = product_kernels(runtime, types);
  LinearUnits panels{&product, partition_product(rows, product.k, ceil_div(experts, kPanel),
                                                 {kernels.max_rows, lease.num_threads()})};
  lease.run({kernels.linear, &panels, panels.grid.units(), kMaxPanels},
            rows * experts * product.k > kMinParallelOps);
  RouteUnits units{&task, logits};
  lease.run({runtime.kernels.route, &units, rows, 16}, rows * experts > kMinParallelElements / 4);
}

void grouped_gated_linear(const Runtime& runtime, ProductTypes types,
                          const GroupedGatedTask& task) {
  const GatedTask& product = task.product;
  if (product.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  const ProductKernels kernels = product_kernels(runtime, types);
  Sorted sorted = sort_by_expert(task.choice, product.rows, lease.scratch());
  int64_t units = 0;
  for (int64_t g = 0; g < sorted.num_groups; g++) {
    ExpertGroup& group = sorted.groups[g];
    group.first_unit = units;
    group.grid = partition_product(group.rows, product.k, ceil_div(product.f, kLanes),
                             {kernels.max_rows, 1});
    units += group.grid.units();
  }
  const void* x = gathered_rows(runtime, lease, types, sorted,
                                {product.rows, product.k, product.x, product.w},
                                task.choice.num_chosen);
  GroupedGatedUnits context{&task, {sorted.groups, sorted.num_groups, sorted.pairs, x}};
  lease.run({kernels.grouped_gated, &context, units, kMaxPanels},
            sorted.num_pairs * product.f * product.k > kMinParallelOps);
}

void head_linear(const Runtime& runtime, ProductTypes types, const HeadLinearTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  const ProductKernels kernels = product_kernels(runtime, types);
  const int64_t num_rows = task.heads * task.rows, panels = ceil_div(task.n, kPanel);
  Sorted sorted{lease.scratch().take<ExpertGroup>(task.heads), task.heads, num_rows, nullptr};
  const Grid grid = partition_product(task.rows, task.k, panels, {kernels.max_rows, 1});
  for (int64_t head = 0; head < task.heads; head++) {
    sorted.groups[head] = {head, head * task.rows, task.rows, head * grid.units(), grid};
  }
  const void* x = gather_heads(lease, types, task);
  if (is_quantised(types.weight)) {
    const bool has_orders = input_order(task.w) != nullptr;
    x = quantise_rows(runtime, lease, types,
                      {num_rows, task.k, x, nullptr,
                       has_orders ? orders_of_pairs(lease.scratch(), sorted, task.w) : nullptr});
  }
  HeadLinearUnits context{&task, {sorted.groups, task.heads, nullptr, x}};
  lease.run({kernels.head_linear, &context, task.heads * grid.units(), kMaxPanels},
            num_rows * task.n * task.k > kMinParallelOps);
}

void grouped_linear(const Runtime& runtime, ProductTypes types, const GroupedLinearTask& task) {
  const LinearTask& product = task.product;
  if (product.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  Sorted sorted = sort_by_expert(task.choice, product.rows, lease.scratch());
  const int64_t pairs = task.choice.num_pairs(product.rows);
  const void* x = gathered_rows(runtime, lease, types, sorted,
                                {pairs, product.k, product.x, product.w}, 1);
  const ProductKernels kernels = product_kernels(runtime, types);
  const int64_t panels = ceil_div(product.n, kPanel);
  const int64_t block = std::clamp<int64_t>(kMaxPartials / (pairs * kPanel), 1, panels);
  GroupedLinearUnits context{&task, {sorted.groups, sorted.num_groups, sorted.pairs, x}, 0, 0,
                             lease.scratch().take<float>(pairs * block * kPanel)};
  for (; context.first_panel < panels; context.first_panel += block) {
    context.num_panels = std::min(block, panels - context.first_panel);
    const int64_t columns = context.num_panels * kPanel;
    lease.run({kernels.grouped_linear, &context, sorted.num_groups * context.num_panels, kMaxPanels},
              pairs * columns * product.k > kMinParallelOps);
    lease.run({kernels.combine, &context, context.num_panels, kMaxPanels},
              pairs * columns > kMinParallelElements);
  }
}

int64_t count_active_experts(const ExpertChoice& choice, int64_t rows) {
  Arena scratch;
  return sort_by_expert(choice, rows, scratch).num_groups;
}

}  // namespace cadenza
