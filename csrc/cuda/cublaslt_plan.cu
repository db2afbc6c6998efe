// cublasLt's descriptors, and the choice among its algorithms.
#include "cuda/cublaslt_plan.h"

#include <map>
#include <mutex>

namespace cadenza::cuda {

namespace {

constexpr int kMostHeuristics = 16;
// Of arrays within a program's scratch memory; cublasLt supposes 256.
constexpr uint32_t kAlignment = 64;

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

// One for each device, for the life of the process.
lt::Handle handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, lt::Handle> handles;
  std::lock_guard<std::mutex> lock(mutex);
  lt::Handle& handle = handles[device];
  if (handle == nullptr) require_success(cublaslt()->create(&handle), "cublasLtCreate");
  return handle;
}

int64_t attribute(const lt::Algorithm& algorithm, int which) {
  int32_t value = 0;
  size_t written = 0;
  if (cublaslt()->get_algorithm(&algorithm, which, &value, sizeof(value), &written) != 0) return -1;
  return value;
}

}  // namespace

int current_device() {
  int device = 0;
#ifndef CADENZA_EMULATED_GPU
  check(cudaGetDevice(&device));
#endif
  return device;
}

// cublasLt's matrices are by columns: it computes the transpose, [n, rows] from w and x.
SharedPlan::SharedPlan(const SharedShape& shape, bool plants_split)
    : handle_(handle_of(current_device())), types_(shape.types) {
  const lt::Functions& f = *cublaslt();
  const bool is_int8 = types_ == SharedTypes::kInt8ToInt32;
  const int in = is_int8 ? lt::kI8 : lt::kBf16;
  const int out = is_int8 ? lt::kI32 : (types_ == SharedTypes::kBf16ToF32 ? lt::kF32 : lt::kBf16);
  const auto n = uint64_t(shape.n), k = uint64_t(shape.k), rows = uint64_t(shape.rows);
  require_success(f.create_product(&product_, is_int8 ? lt::kComputeI32 : lt::kComputeF32,
                                   is_int8 ? lt::kI32 : lt::kF32),
                  "cublasLtMatmulDescCreate");
  require_success(set(f.set_product, product_, lt::kTransposesA, lt::kTransposed), "the transpose of w");
  require_success(f.create_matrix(&w_, in, k, n, shape.k), "the layout of w");
  require_success(f.create_matrix(&x_, in, k, rows, shape.k), "the layout of x");
  require_success(f.create_matrix(&out_, out, n, rows, shape.n), "the layout of the result");
  if (plants_split) {
    plant();
  } else {
    choose();
  }
}

void SharedPlan::run(const void* w, const void* x, const void* addend, void* out) const {
  const float one = 1.0f, beta = addend == nullptr ? 0.0f : 1.0f;
  const int32_t whole_one = 1, whole_beta = int32_t(beta);
  const bool is_int8 = types_ == SharedTypes::kInt8ToInt32;
  const void* factors[] = {is_int8 ? static_cast<const void*>(&whole_one) : &one,
                           is_int8 ? static_cast<const void*>(&whole_beta) : &beta};
  require_success(cublaslt()->multiply(handle_, product_, factors[0], w, w_, x, x_, factors[1],
                                       addend == nullptr ? out : addend, out_, out, out_, &algorithm_,
                                       planted_workspace, workspace_bytes_, context.stream),
                  "cublasLtMatmul");
}

std::vector<lt::Heuristic> SharedPlan::candidates(size_t workspace_bytes, uint32_t schemes) const {
  const lt::Functions& f = *cublaslt();
  lt::Descriptor preference = nullptr;
  require_success(f.create_preference(&preference), "cublasLtMatmulPreferenceCreate");
  require_success(set(f.set_preference, preference, lt::kMostWorkspace, workspace_bytes), "the workspace's bound");
  require_success(set(f.set_preference, preference, lt::kReductionSchemes, schemes), "the reduction schemes");
  for (const int operand : {lt::kAlignmentOfA, lt::kAlignmentOfB, lt::kAlignmentOfC, lt::kAlignmentOfD}) {
    require_success(set(f.set_preference, preference, operand, kAlignment), "the alignment of operands");
  }
  std::vector<lt::Heuristic> all(kMostHeuristics);
  int num = 0;
  const lt::Status status =
      f.find(handle_, product_, w_, x_, out_, out_, preference, kMostHeuristics, all.data(), &num);
  all.resize(status == 0 ? size_t(num) : 0);
  return all;
}

// The best without a second sum over parts of K: none is split, nothing is kept in a workspace.
void SharedPlan::choose() {
  for (const lt::Heuristic& each : candidates(0, lt::kNone)) {
    const bool is_whole = attribute(each.algorithm, lt::kSplits) <= 1 &&
                          attribute(each.algorithm, lt::kReductionScheme) <= int(lt::kNone);
    if (each.status == 0 && each.workspace_bytes == 0 && is_whole) return take(each);
  }
  found_ = {false, "cublasLt has no unsplit algorithm"};
}

// A fault for tests of the proof: an algorithm that splits K.
void SharedPlan::plant() {
  const std::vector<lt::Heuristic> all = candidates(kPlantedBytes, lt::kAnyScheme);
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

void SharedPlan::take(const lt::Heuristic& each) {
  algorithm_ = each.algorithm;
  workspace_bytes_ = each.workspace_bytes;
  found_ = {true, "cublasLt algorithm " + std::to_string(attribute(algorithm_, lt::kId)) + ", tile " +
                      std::to_string(attribute(algorithm_, lt::kTile)) + ", stages " +
                      std::to_string(attribute(algorithm_, lt::kStages)) + ", splits " +
                      std::to_string(attribute(algorithm_, lt::kSplits))};
}

}  // namespace cadenza::cuda
