// A model of cublasLt for the emulation: products on the host, in an order of K that tests choose.
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "cuda/fake_cublaslt.h"

namespace cadenza::cuda {

namespace {

using lt::Algorithm;
using lt::Descriptor;
using lt::Handle;
using lt::Heuristic;
using lt::Status;

constexpr Status kSuccess = 0, kInvalid = 7;
constexpr size_t kSplitWorkspace = 1024;

FakeCublasLt behaviour = FakeCublasLt::kSound;

struct Product {
  int compute_type, transposes_a = 0;
};
struct Matrix {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Preference {
  size_t workspace_bytes = 0;
  uint32_t schemes = 0;
};

size_t version() { return 130100; }
Status create(Handle* handle) {
  *handle = &behaviour;
  return kSuccess;
}
Status create_product(Descriptor* product, int compute_type, int) {
  *product = new Product{compute_type};
  return kSuccess;
}
Status set_product(Descriptor product, int attribute, const void* value, size_t bytes) {
  if (attribute != lt::kTransposesA || bytes != sizeof(int)) return kInvalid;
  std::memcpy(&static_cast<Product*>(product)->transposes_a, value, bytes);
  return kSuccess;
}
Status create_matrix(Descriptor* matrix, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  if (type == lt::kI8) return kInvalid;
  *matrix = new Matrix{type, rows, columns, stride};
  return kSuccess;
}
Status create_preference(Descriptor* preference) {
  *preference = new Preference;
  return kSuccess;
}
Status set_preference(Descriptor preference, int attribute, const void* value, size_t bytes) {
  auto* to = static_cast<Preference*>(preference);
  if (attribute == lt::kMostWorkspace && bytes == sizeof(size_t)) {
    std::memcpy(&to->workspace_bytes, value, bytes);
  } else if (attribute == lt::kReductionSchemes && bytes == sizeof(uint32_t)) {
    std::memcpy(&to->schemes, value, bytes);
  } else {
    return attribute >= lt::kAlignmentOfA && attribute <= lt::kAlignmentOfD && bytes == sizeof(uint32_t) ? kSuccess
                                                                                                        : kInvalid;
  }
  return kSuccess;
}

// The first splits K, whatever is preferred: callers look at what they take.
Status find(Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, int most,
            Heuristic* found, int* num_found) {
  const Heuristic all[] = {{{{4}}, kSplitWorkspace, kSuccess, 1.0f, {}}, {{{1}}, 0, kSuccess, 1.0f, {}}};
  *num_found = most < 2 ? most : 2;
  std::copy(all, all + *num_found, found);
  return kSuccess;
}
Status check_algorithm(Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, const Algorithm* algorithm,
                       Heuristic* result) {
  *result = {*algorithm, kSplitWorkspace, kSuccess, 1.0f, {}};
  return kSuccess;
}
Status get_algorithm(const Algorithm* algorithm, int attribute, void* value, size_t bytes, size_t* written) {
  const int32_t splits = int32_t(algorithm->data[0]);
  const int32_t found = attribute == lt::kSplits             ? splits
                        : attribute == lt::kReductionScheme ? (splits > 1 ? int(lt::kComputeType) : 0)
                                                            : 1;
  if (bytes != sizeof(found)) return kInvalid;
  std::memcpy(value, &found, sizeof(found));
  *written = sizeof(found);
  return kSuccess;
}
Status set_algorithm(Algorithm* algorithm, int attribute, const void* value, size_t) {
  if (attribute == lt::kSplits) std::memcpy(&algorithm->data[0], value, sizeof(int32_t));
  return kSuccess;
}

float sum_of(const bf16* a, const bf16* b, int64_t k, int64_t splits) {
  float total = 0.0f;
  const int64_t part = (k + splits - 1) / splits;
  for (int64_t begin = 0; begin < k; begin += part) {
    float sum = 0.0f;
    const int64_t end = begin + part < k ? begin + part : k;
    for (int64_t i = begin; i < end; i++) {
      const int64_t at = behaviour == FakeCublasLt::kBackward ? end - 1 - (i - begin) : i;
      sum = fmaf(to_float(a[at]), to_float(b[at]), sum);
    }
    total = begin == 0 ? sum : total + sum;
  }
  return total;
}

Status multiply(Handle, Descriptor product, const void* alpha, const void* a, Descriptor a_matrix, const void* b,
                Descriptor b_matrix, const void* beta, const void* c, Descriptor c_matrix, void* d,
                Descriptor d_matrix, const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void*) {
  const auto& left = *static_cast<Matrix*>(a_matrix);
  const auto& right = *static_cast<Matrix*>(b_matrix);
  const auto& out = *static_cast<Matrix*>(d_matrix);
  const int64_t splits = int64_t(algorithm->data[0]);
  const bool fits = static_cast<Product*>(product)->transposes_a == lt::kTransposed && c_matrix == d_matrix &&
                    left.rows == right.rows && left.columns == out.rows && right.columns == out.columns &&
                    left.type == lt::kBf16 && right.type == lt::kBf16;
  if (!fits || (splits > 1 && (workspace == nullptr || workspace_bytes < kSplitWorkspace))) return kInvalid;
  for (uint64_t column = 0; column < out.columns; column++) {
    for (uint64_t row = 0; row < out.rows; row++) {
      const float sum = sum_of(static_cast<const bf16*>(a) + int64_t(row) * left.stride,
                               static_cast<const bf16*>(b) + int64_t(column) * right.stride, int64_t(left.rows), splits);
      const int64_t at = int64_t(column) * out.stride + int64_t(row);
      float value = *static_cast<const float*>(alpha) * sum;
      if (*static_cast<const float*>(beta) != 0.0f) value += static_cast<const float*>(c)[at];
      if (out.type == lt::kF32) {
        static_cast<float*>(d)[at] = value;
      } else {
        static_cast<bf16*>(d)[at] = to_bf16(value);
      }
    }
  }
  return kSuccess;
}

constexpr lt::Functions kFunctions{version,        create,        create_product, set_product,
                                   create_matrix,  create_preference, set_preference, find,
                                   check_algorithm, get_algorithm, set_algorithm,  multiply};

}  // namespace

void behave(FakeCublasLt as) { behaviour = as; }

void search_cublaslt_in(const char*) {}

const lt::Functions* cublaslt() { return behaviour == FakeCublasLt::kAbsent ? nullptr : &kFunctions; }

}  // namespace cadenza::cuda
