// What was planned and chosen for each product, and products by cublasLt with their epilogue.
#include "cuda/lt_product.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "cuda/bf16_product.h"
#include "cuda/epilogue.h"
#include "cuda/tiles.h"

namespace cadenza::cuda {

namespace {

// Bytes of the sums of gate and up which a gated product keeps at a time: they stay in the cache
// between cublasLt and the activation.
#ifdef CADENZA_EMULATED_GPU
constexpr int64_t kGatedSumBytes = 16 << 10;  // tests' weights are small
#else
constexpr int64_t kGatedSumBytes = 32 << 20;
#endif
constexpr int64_t kColumnUnit = 128;

// What was planned and chosen, for the life of the process.
struct Registry {
  std::mutex mutex;
  std::map<decltype(SharedShape{}.key()), std::unique_ptr<SharedPlan>> plans;
  std::map<std::tuple<int, int64_t, int64_t, int64_t, bool, bool>, ProductKernel> chosen;
};

Registry& registry() {
  static Registry all;
  return all;
}

const SharedPlan& plan_of(const SharedShape& shape) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<SharedPlan>& plan = all.plans[shape.key()];
  if (plan == nullptr) plan = std::make_unique<SharedPlan>(shape, has_fault(Fault::kSplitLibrary));
  return *plan;
}

// Products of heads and those with rows apart are not proven: their key is of no other product.
auto key_of(const ProductTask& task) {
  const bool is_plain = task.heads.num == 1 && task.row_of_x() == task.k && is_aligned<bf16>(task);
  return std::tuple(current_device(), is_plain ? task.rows : -1, task.n, task.k, task.is_gated, task.out_is_f32);
}

// Columns of the gate whose sums are kept at a time.
int64_t gated_columns(const ProductTask& task) {
  const int64_t f = task.n / 2, most = kGatedSumBytes / (2 * int64_t(sizeof(float)) * task.rows);
  const int64_t parts = ceil_div(f, std::max(most, kColumnUnit));
  return std::min(f, round_up(ceil_div(f, parts), kColumnUnit));
}

// cublasLt writes the result itself, and adds the residual as our epilogue does, by one addition.
bool is_direct(const ProductTask& task) {
  return !task.is_gated && task.bias == nullptr && task.scale == 1.0f &&
         (task.residual == nullptr || task.out_is_f32);
}

SharedShape shape_of(const ProductTask& task) {
  if (task.is_gated) return {task.rows, gated_columns(task), task.k, SharedTypes::kBf16ToF32};
  const bool keeps_sums = !is_direct(task) || task.out_is_f32;
  return {task.rows, task.n, task.k, keeps_sums ? SharedTypes::kBf16ToF32 : SharedTypes::kBf16ToBf16};
}

int64_t num_sums(const ProductTask& task) {
  if (task.is_gated) return 2 * task.rows * gated_columns(task);
  return is_direct(task) ? 0 : task.rows * task.n;
}

constexpr unsigned kThreads = 256;
constexpr int kUnroll = 4;

__global__ void __launch_bounds__(kThreads) finish_sums(const float* sums, int64_t columns, Epilogue epilogue) {
  take_turn();
  const int64_t row = blockIdx.y;
  for (int i = 0; i < kUnroll; i++) {
    const int64_t column = (int64_t(blockIdx.x) * kUnroll + i) * kThreads + threadIdx.x;
    if (column < columns) epilogue.finish(row, column, sums[row * columns + column]);
  }
}

// Sums of the columns [first, first + columns) of gate and up.
__global__ void __launch_bounds__(kThreads)
    finish_gated_sums(const float* gates, const float* ups, int64_t first, int64_t columns, Epilogue epilogue) {
  take_turn();
  const int64_t row = blockIdx.y;
  for (int i = 0; i < kUnroll; i++) {
    const int64_t column = (int64_t(blockIdx.x) * kUnroll + i) * kThreads + threadIdx.x;
    if (column >= columns) return;
    const int64_t at = row * columns + column;
    epilogue.finish_gated(row, first + column, gates[at], ups[at]);
  }
}

dim3 finishing_grid(int64_t rows, int64_t columns) {
  return {unsigned(ceil_div(columns, kThreads * kUnroll)), unsigned(rows)};
}

void gated_shared(const ProductTask& task, float* sums) {
  const int64_t f = task.n / 2, most = gated_columns(task);
  const auto* w = static_cast<const bf16*>(task.w.data);
  float* ups = sums + task.rows * most;
  for (int64_t first = 0; first < f; first += most) {
    const int64_t columns = std::min(most, f - first);
    const SharedPlan& plan = plan_of({task.rows, columns, task.k, SharedTypes::kBf16ToF32});
    plan.run(w + first * task.k, task.x, nullptr, sums);
    plan.run(w + (f + first) * task.k, task.x, nullptr, ups);
    launch_early(finish_gated_sums, finishing_grid(task.rows, columns), kThreads, 0, sums, ups, first, columns,
                 epilogue_of(task));
  }
}

void shared_product(const ProductTask& task, float* sums) {
  if (task.is_gated) return gated_shared(task, sums);
  const SharedPlan& plan = plan_of(shape_of(task));
  if (is_direct(task)) return plan.run(task.w.data, task.x, task.residual, task.out);
  plan.run(task.w.data, task.x, nullptr, sums);
  launch_early(finish_sums, finishing_grid(task.rows, task.n), kThreads, 0, sums, task.n, epilogue_of(task));
}

ProductKernel kernel_of(const ProductTask& task) {
  if (forced_kernel != nullptr) return *forced_kernel;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.chosen.find(key_of(task));
  return found == all.chosen.end() ? ProductKernel{} : found->second;
}

}  // namespace

bool can_be_shared(const ProductTask& task) {
  return task.rows >= kLeastSharedRows && task.heads.num == 1 && task.row_of_x() == task.k &&
         task.row_of_out() == task.out_columns() && is_aligned<bf16>(task) && task.n % 16 == 0;
}

void bf16_product(const ProductTask& task, Workspace& workspace) {
  float* sums = can_be_shared(task) ? workspace.take<float>(num_sums(task)) : nullptr;
  if (context.is_measured) return;
  const ProductKernel kernel = kernel_of(task);
  if (kernel.is_shared) return shared_product(task, sums);
  own_bf16_product(task, kernel.own);
}

SharedAlgorithm shared_algorithm(const ProductTask& task) {
  if (!can_be_shared(task)) return {false, "few rows, or a layout that is not cublasLt's"};
  if (cublaslt() == nullptr) return {false, "cublasLt was not found"};
  SharedAlgorithm found = plan_of(shape_of(task)).algorithm();
  const int64_t rest = task.is_gated ? task.n / 2 % gated_columns(task) : 0;
  if (found.exists && rest > 0) {
    const SharedAlgorithm last = plan_of({task.rows, rest, task.k, SharedTypes::kBf16ToF32}).algorithm();
    if (!last.exists) return last;
  }
  return found;
}

void choose(const ProductTask& task, const ProductKernel& kernel) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.chosen[key_of(task)] = kernel;
}

void forget_algorithms() {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.plans.clear();
  all.chosen.clear();
}

}  // namespace cadenza::cuda
