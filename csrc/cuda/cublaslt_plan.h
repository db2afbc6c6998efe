// Products by cublasLt of one shape: an algorithm that does not split K.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/launch.h"

namespace cadenza::cuda {

// A planted algorithm that splits K (core/faults.h) keeps partial sums, in memory of the proof's.
constexpr size_t kPlantedBytes = 64 << 20;
inline thread_local void* planted_workspace = nullptr;

enum class SharedTypes : int { kBf16ToF32, kBf16ToBf16, kInt8ToInt32 };

int current_device();

// out [rows, n] = x [rows, k] times w [n, k], all side by side.
struct SharedShape {
  int64_t rows, n, k;
  SharedTypes types;
  auto key() const { return std::tuple(current_device(), rows, n, k, types); }
};

// The algorithm in words, or why there is none, which `exists` tells.
struct SharedAlgorithm {
  bool exists;
  std::string text;
};

// Throws std::runtime_error where cublasLt refuses the shape. cublaslt() is not null.
class SharedPlan {
 public:
  SharedPlan(const SharedShape& shape, bool plants_split);
  const SharedAlgorithm& algorithm() const { return found_; }
  // out = x w + addend, which is of out's type and may be out, or null.
  void run(const void* w, const void* x, const void* addend, void* out) const;

 private:
  std::vector<lt::Heuristic> candidates(size_t workspace_bytes, uint32_t schemes) const;
  void choose();
  void plant();
  void take(const lt::Heuristic& each);

  lt::Handle handle_;
  SharedTypes types_;
  lt::Descriptor product_ = nullptr, w_ = nullptr, x_ = nullptr, out_ = nullptr;
  lt::Algorithm algorithm_{};
  size_t workspace_bytes_ = 0;
  SharedAlgorithm found_{};
};

}  // namespace cadenza::cuda
