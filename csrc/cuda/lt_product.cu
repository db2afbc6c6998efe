// Plans of cublasLt's products, and what was chosen for each product.
#include "cuda/lt_product.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "cuda/bf16_product.h"
#include "cuda/cublaslt.h"
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
constexpr int kMostHeuristics = 16;

void require_success(lt::Status status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("cublasLt: ") + what + " failed with status " + std::to_string(status));
  }
}

template <class Value>
lt::Status set(lt::Status (*function)(lt::Descriptor, int, const void*, size_t), lt::Descriptor of,
               int attribute, Value value) {
  return function(of, attribute, &value, sizeof(value));
}

int current_device() {
  int device = 0;
#ifndef CADENZA_EMULATED_GPU
  check(cudaGetDevice(&device));
#endif
  return device;
}

lt::Handle handle_of(int device) {
  static std::map<int, lt::Handle> handles;
  lt::Handle& handle = handles[device];
  if (handle == nullptr) require_success(cublaslt()->create(&handle), "cublasLtCreate");
  return handle;
}

// The columns [rows, n] of x w, w [n, k], in f32 or bf16, side by side.
struct Shape {
  int64_t rows, n, k;
  bool is_f32;
  auto key() const { return std::tuple(current_device(), rows, n, k, is_f32); }
};

// An algorithm for products of one shape. cublasLt's matrices are by columns: it computes the
// transpose, [n, rows] from w and x.
class Plan {
 public:
  explicit Plan(const Shape& shape, bool plants_split) : handle_(handle_of(current_device())) {
    const lt::Functions& f = *cublaslt();
    const int type = shape.is_f32 ? lt::kF32 : lt::kBf16;
    require_success(f.create_product(&product_, lt::kComputeF32, lt::kF32), "cublasLtMatmulDescCreate");
    require_success(set(f.set_product, product_, lt::kTransposesA, lt::kTransposed), "the transpose of w");
    require_success(f.create_matrix(&w_, lt::kBf16, uint64_t(shape.k), uint64_t(shape.n), shape.k), "the layout of w");
    require_success(f.create_matrix(&x_, lt::kBf16, uint64_t(shape.k), uint64_t(shape.rows), shape.k), "the layout of x");
    require_success(f.create_matrix(&out_, type, uint64_t(shape.n), uint64_t(shape.rows), shape.n),
                    "the layout of the result");
    if (plants_split) {
      plant();
    } else {
      choose();
    }
  }

  const SharedAlgorithm& algorithm() const { return found_; }

  // out = x w + addend, which may be out, or null.
  void run(const void* w, const void* x, const float* addend, void* out) const {
    const float one = 1.0f, beta = addend == nullptr ? 0.0f : 1.0f;
    require_success(
        cublaslt()->multiply(handle_, product_, &one, w, w_, x, x_, &beta, addend == nullptr ? out : addend,
                             out_, out, out_, &algorithm_, planted_workspace, workspace_bytes_, context.stream),
        "cublasLtMatmul");
  }

 private:
  std::vector<lt::Heuristic> candidates(size_t workspace_bytes, uint32_t schemes) const {
    const lt::Functions& f = *cublaslt();
    lt::Descriptor preference = nullptr;
    require_success(f.create_preference(&preference), "cublasLtMatmulPreferenceCreate");
    require_success(set(f.set_preference, preference, lt::kMostWorkspace, workspace_bytes), "the workspace's bound");
    require_success(set(f.set_preference, preference, lt::kReductionSchemes, schemes), "the reduction schemes");
    std::vector<lt::Heuristic> all(kMostHeuristics);
    int num = 0;
    const lt::Status status =
        f.find(handle_, product_, w_, x_, out_, out_, preference, kMostHeuristics, all.data(), &num);
    all.resize(status == 0 ? size_t(num) : 0);
    return all;
  }

  int64_t attribute(const lt::Algorithm& algorithm, int which) const {
    int32_t value = 0;
    size_t written = 0;
    if (cublaslt()->get_algorithm(&algorithm, which, &value, sizeof(value), &written) != 0) return -1;
    return value;
  }

  // The best without a second sum over parts of K: none is split, nothing is kept in a workspace.
  void choose() {
    for (const lt::Heuristic& each : candidates(0, lt::kNone)) {
      const bool is_whole = attribute(each.algorithm, lt::kSplits) <= 1 &&
                            attribute(each.algorithm, lt::kReductionScheme) <= int(lt::kNone);
      if (each.status != 0 || each.workspace_bytes > 0 || !is_whole) continue;
      return take(each);
    }
    found_ = {false, "cublasLt has no unsplit algorithm"};
  }

  // A fault for tests of the proof: an algorithm that splits K.
  void plant() {
    std::vector<lt::Heuristic> all = candidates(kPlantedBytes, lt::kAnyScheme);
    for (const lt::Heuristic& each : all) {
      if (each.status == 0 && attribute(each.algorithm, lt::kSplits) > 1) return take(each);
    }
    for (lt::Heuristic each : all) {
      const int32_t splits = 4;
      const uint32_t scheme = lt::kComputeType;
      cublaslt()->set_algorithm(&each.algorithm, lt::kSplits, &splits, sizeof(splits));
      cublaslt()->set_algorithm(&each.algorithm, lt::kReductionScheme, &scheme, sizeof(scheme));
      lt::Heuristic checked{};
      const lt::Status status =
          cublaslt()->check(handle_, product_, w_, x_, out_, out_, &each.algorithm, &checked);
      each.workspace_bytes = checked.workspace_bytes;
      if (status == 0 && checked.workspace_bytes <= kPlantedBytes) return take(each);
    }
    found_ = {false, "cublasLt has no split algorithm"};
  }

  void take(const lt::Heuristic& each) {
    algorithm_ = each.algorithm;
    workspace_bytes_ = each.workspace_bytes;
    found_ = {true, "cublasLt algorithm " + std::to_string(attribute(algorithm_, lt::kId)) + ", tile " +
                        std::to_string(attribute(algorithm_, lt::kTile)) + ", stages " +
                        std::to_string(attribute(algorithm_, lt::kStages)) + ", splits " +
                        std::to_string(attribute(algorithm_, lt::kSplits))};
  }

  lt::Handle handle_;
  lt::Descriptor product_ = nullptr, w_ = nullptr, x_ = nullptr, out_ = nullptr;
  lt::Algorithm algorithm_{};
  size_t workspace_bytes_ = 0;
  SharedAlgorithm found_{};
};

// What was planned and chosen, for the life of the process.
struct Registry {
  std::mutex mutex;
  std::map<decltype(Shape{}.key()), std::unique_ptr<Plan>> plans;
  std::map<std::tuple<int, int64_t, int64_t, int64_t, bool, bool>, ProductKernel> chosen;
};

Registry& registry() {
  static Registry all;
  return all;
}

const Plan& plan_of(const Shape& shape) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<Plan>& plan = all.plans[shape.key()];
  if (plan == nullptr) plan = std::make_unique<Plan>(shape, has_fault(Fault::kSplitLibrary));
  return *plan;
}

auto key_of(const ProductTask& task) {
  return std::tuple(current_device(), task.rows, task.n, task.k, task.is_gated, task.out_is_f32);
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

Shape shape_of(const ProductTask& task) {
  if (task.is_gated) return {task.rows, gated_columns(task), task.k, true};
  return {task.rows, task.n, task.k, !is_direct(task) || task.out_is_f32};
}

int64_t num_sums(const ProductTask& task) {
  if (task.is_gated) return 2 * task.rows * gated_columns(task);
  return is_direct(task) ? 0 : task.rows * task.n;
}

constexpr unsigned kThreads = 256;
constexpr int kUnroll = 4;

__global__ void __launch_bounds__(kThreads) finish_sums(const float* sums, int64_t columns, Epilogue epilogue) {
  const int64_t row = blockIdx.y;
  for (int i = 0; i < kUnroll; i++) {
    const int64_t column = (int64_t(blockIdx.x) * kUnroll + i) * kThreads + threadIdx.x;
    if (column < columns) epilogue.finish(row, column, sums[row * columns + column]);
  }
}

// Sums of the columns [first, first + columns) of gate and up.
__global__ void __launch_bounds__(kThreads)
    finish_gated_sums(const float* gates, const float* ups, int64_t first, int64_t columns, Epilogue epilogue) {
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
    const Plan& plan = plan_of({task.rows, columns, task.k, true});
    plan.run(w + first * task.k, task.x, nullptr, sums);
    plan.run(w + (f + first) * task.k, task.x, nullptr, ups);
    launch(finish_gated_sums, finishing_grid(task.rows, columns), kThreads, 0, sums, ups, first, columns,
           epilogue_of(task));
  }
}

void shared_product(const ProductTask& task, float* sums) {
  if (task.is_gated) return gated_shared(task, sums);
  const Plan& plan = plan_of(shape_of(task));
  if (is_direct(task)) return plan.run(task.w.data, task.x, task.residual, task.out);
  plan.run(task.w.data, task.x, nullptr, sums);
  launch(finish_sums, finishing_grid(task.rows, task.n), kThreads, 0, sums, task.n, epilogue_of(task));
}

ProductKernel kernel_of(const ProductTask& task) {
  if (product_kernel != ProductKernel::kProven) return product_kernel;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.chosen.find(key_of(task));
  return found == all.chosen.end() ? ProductKernel::kOwn : found->second;
}

}  // namespace

bool can_be_shared(const ProductTask& task) {
  return task.rows >= kLeastSharedRows && task.heads.num == 1 && task.row_of_x() == task.k &&
         task.row_of_out() == task.out_columns() && is_aligned<bf16>(task) && task.n % 16 == 0;
}

void bf16_product(const ProductTask& task, Workspace& workspace) {
  if (!can_be_shared(task)) return own_bf16_product(task);
  float* sums = workspace.take<float>(num_sums(task));
  if (context.is_measured) return;
  if (kernel_of(task) == ProductKernel::kShared) return shared_product(task, sums);
  own_bf16_product(task);
}

SharedAlgorithm shared_algorithm(const ProductTask& task) {
  if (!can_be_shared(task)) return {false, "few rows, or a layout that is not cublasLt's"};
  if (cublaslt() == nullptr) return {false, "cublasLt was not found"};
  SharedAlgorithm found = plan_of(shape_of(task)).algorithm();
  const int64_t rest = task.is_gated ? task.n / 2 % gated_columns(task) : 0;
  if (found.exists && rest > 0) {
    const SharedAlgorithm last = plan_of({task.rows, rest, task.k, true}).algorithm();
    if (!last.exists) return last;
  }
  return found;
}

void choose(const ProductTask& task, ProductKernel kernel) {
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
