// Rows that repeat, in every bucket, beside each alone.
#include "cuda/proof.h"

#include <algorithm>

#include "cuda/bf16_product.h"
#include "cuda/device_memory.h"
#include "cuda/lt_product.h"

namespace cadenza::cuda {

namespace {

// Rows that differ; the rows of a bucket are these again and again, so that each place in a tile has
// each of them in some bucket, and one short reference serves all.
constexpr int64_t kPatterns = 13;
constexpr unsigned kThreads = 256;
constexpr int kTrials = 3;

__device__ uint32_t scrambled(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Both signs, and magnitudes of eight binades: sums in another order round otherwise.
template <class T>
__global__ void fill_rows(T* to, int64_t columns, uint32_t seed) {
  const int64_t row = blockIdx.y, column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  const uint32_t word = scrambled(uint32_t(column) + scrambled(uint32_t(row % kPatterns) + seed));
  const uint32_t exponent = 127 - 6 + (word >> 24) % 8;
  to[row * columns + column] = from_float<T>(as_bits<float>((word & 0x80000000u) | exponent << 23 | (word & 0x7fffffu)));
}

// Keeps 1 + the number of some row that differs from its pattern's.
template <class Word>
__global__ void compare_rows(const Word* found, const Word* expected, int64_t columns, int* differing) {
  const int64_t row = blockIdx.y, column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  if (found[row * columns + column] != expected[row % kPatterns * columns + column]) *differing = int(row) + 1;
}

dim3 grid_of(int64_t rows, int64_t columns) {
  return {unsigned(ceil_div(columns, kThreads)), unsigned(rows)};
}

// Bytes of a bucket's results in float32 from which residuals are left out, and from which it is not
// proven: its products are computed by the first of our kernels.
constexpr int64_t kMostResidualBytes = 256 << 20, kMostResultBytes = 640 << 20;

struct Bucket {
  int64_t rows;
  bool is_f32;          // the result
  bool is_shared;       // computed by cublasLt
  bool has_difference;  // cublasLt's bits differ
  std::string text;     // its algorithm, or why there is none
  std::string tile;     // of the fastest of our kernels
  double own_s, shared_s;
};

class Proof {
 public:
  explicit Proof(const ProofRequest& request)
      : request_(request),
        columns_(request.is_gated ? request.n / 2 : request.n),
        most_rows_(most_rows_of(request.rows, columns_)),
        has_residual_(!request.is_gated && most_rows_ * columns_ * 4 <= kMostResidualBytes),
        x_(size_t(most_rows_ * request.k) * sizeof(float)),
        residual_(has_residual_ ? size_t(most_rows_ * columns_) * sizeof(float) : 1),
        out_(size_t(most_rows_ * columns_) * sizeof(float)),
        expected_(size_t(kPatterns * columns_) * sizeof(float)),
        differing_(sizeof(int)),
        planted_(kHasFaults ? kPlantedBytes : 1) {
    planted_workspace = kHasFaults ? planted_.data() : nullptr;
    const bool is_bf16 = request.x_type == DType::kBf16;
    if (is_bf16) {
      fill(reinterpret_cast<bf16*>(x_.data()), request.k, 1);
    } else {
      fill(reinterpret_cast<float*>(x_.data()), request.k, 1);
    }
    if (has_residual_) fill(reinterpret_cast<float*>(residual_.data()), columns_, 2);
  }
  ~Proof() {
    planted_workspace = nullptr;
    forced_kernel = nullptr;
  }

  std::vector<Bucket> run() {
    std::vector<Bucket> buckets;
    for (const bool is_f32 : {true, false}) {
      if (!is_f32 && request_.x_type == DType::kF32) continue;
      expect(is_f32);
      for (const int64_t rows : request_.rows) {
        if (rows > most_rows_) continue;
        buckets.push_back(bucket(rows, is_f32, !is_f32 && differs(buckets, rows)));
      }
    }
    return buckets;
  }

 private:
  // Of the patterns, or of the largest bucket whose results are not too many.
  static int64_t most_rows_of(const std::vector<int64_t>& rows, int64_t columns) {
    int64_t most = kPatterns;
    for (const int64_t each : rows) {
      if (each > most && each * columns * int64_t(sizeof(float)) <= kMostResultBytes) most = each;
    }
    return most;
  }

  static bool differs(const std::vector<Bucket>& buckets, int64_t rows) {
    return std::any_of(buckets.begin(), buckets.end(),
                       [&](const Bucket& each) { return each.rows == rows && each.has_difference; });
  }

  template <class T>
  void fill(T* to, int64_t columns, uint32_t seed) {
    launch(fill_rows<T>, grid_of(most_rows_, columns), kThreads, 0, to, columns, seed);
  }

  // Results in f32 are those of layers that add to a residual.
  ProductTask task(int64_t rows, bool is_f32) const {
    ProductTask task{};
    task.rows = rows;
    task.n = request_.n;
    task.k = request_.k;
    task.x = x_.data();
    task.x_type = request_.x_type;
    task.w = request_.w;
    task.out = out_.data();
    task.out_is_f32 = is_f32;
    task.is_gated = request_.is_gated;
    if (is_f32 && has_residual_) task.residual = reinterpret_cast<const float*>(residual_.data());
    return task;
  }

  // Measured first, for its workspace.
  void multiply(const ProductTask& task, const ProductKernel& kernel = {}) {
    forced_kernel = &kernel;
    context.is_measured = true;
    context.needed_bytes = 0;
    Workspace needed;
    product(task, needed);
    context.is_measured = false;
    if (context.needed_bytes > context.workspace_bytes) {
      finish_stream();
      workspace_ = std::make_unique<DeviceMemory>(context.needed_bytes);
      context.workspace = workspace_->data();
      context.workspace_bytes = context.needed_bytes;
    }
    Workspace workspace;
    product(task, workspace);
    forced_kernel = nullptr;
  }

  int64_t bytes_of_row(bool is_f32) const { return columns_ * (is_f32 ? 4 : 2); }

  // Each pattern alone.
  void expect(bool is_f32) {
    const int64_t x_bytes = request_.k * (request_.x_type == DType::kBf16 ? 2 : 4);
    for (int64_t row = 0; row < kPatterns; row++) {
      ProductTask alone = task(1, is_f32);
      alone.x = x_.data() + row * x_bytes;
      if (alone.residual != nullptr) alone.residual += row * columns_;
      alone.out = expected_.data() + row * bytes_of_row(is_f32);
      multiply(alone);
    }
  }

  // The number of some row with other bits, or -1.
  int64_t differing_row(int64_t rows, bool is_f32) {
    fill_bytes(differing_.data(), 0, sizeof(int));
    auto* flag = reinterpret_cast<int*>(differing_.data());
    if (is_f32) {
      launch(compare_rows<uint32_t>, grid_of(rows, columns_), kThreads, 0,
             reinterpret_cast<uint32_t*>(out_.data()), reinterpret_cast<uint32_t*>(expected_.data()), columns_, flag);
    } else {
      launch(compare_rows<uint16_t>, grid_of(rows, columns_), kThreads, 0,
             reinterpret_cast<uint16_t*>(out_.data()), reinterpret_cast<uint16_t*>(expected_.data()), columns_, flag);
    }
    int found = 0;
    copy_to_host(&found, flag, sizeof(found));
    return found - 1;
  }

  int64_t differing_row(const ProductTask& task, const ProductKernel& kernel) {
    fill_bytes(out_.data(), 0xff, size_t(task.rows * bytes_of_row(task.out_is_f32)));
    multiply(task, kernel);
    return differing_row(task.rows, task.out_is_f32);
  }

  // The shortest of some trials, with weights that are not in the cache.
  double time_of(const ProductTask& task, const ProductKernel& kernel) {
    double best = 1e9;
    for (int trial = 0; trial < kTrials; trial++) {
      forget_caches();
      best = std::min(best, seconds_of([&] { multiply(task, kernel); }));
    }
    return best;
  }

  void forget_caches() {
#ifndef CADENZA_EMULATED_GPU
    int device = 0, bytes = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
    if (flush_ == nullptr) flush_ = std::make_unique<DeviceMemory>(2 * size_t(bytes));
    fill_bytes(flush_->data(), 0, 2 * size_t(bytes));
#endif
  }

  std::string shape() const {
    return "[" + std::to_string(request_.n) + ", " + std::to_string(request_.k) + "]" +
           (request_.is_gated ? ", gate and up," : "");
  }

  void require_equal(const ProductTask& task, const ProductKernel& kernel) {
    const int64_t row = differing_row(task, kernel);
    if (row < 0) return;
    throw std::runtime_error("the product with a weight " + shape() + " gives row " + std::to_string(row) +
                             " other bits in a step of " + std::to_string(task.rows) + " rows than alone");
  }

  Bucket bucket(int64_t rows, bool is_f32, bool differs_in_f32) {
    const ProductTask task = this->task(rows, is_f32);
    Bucket bucket{rows, is_f32, false, false, "own kernel", "", 0.0, 0.0};
    if (request_.w.format != WeightFormat::kBf16) {
      require_equal(task, {});
      return bucket;
    }
    ProductKernel chosen = fastest_own(task, bucket);
    compare_shared(task, differs_in_f32, bucket);
    if (bucket.is_shared) chosen.is_shared = true;
    choose(task, chosen);
    return bucket;
  }

  ProductKernel fastest_own(const ProductTask& task, Bucket& bucket) {
    ProductKernel fastest{};
    for (int own = 0; own < num_own_kernels(task); own++) {
      const ProductKernel kernel{false, own};
      require_equal(task, kernel);
      const double seconds = time_of(task, kernel);
      if (own > 0 && seconds >= bucket.own_s) continue;
      fastest = kernel;
      bucket.own_s = seconds;
    }
    bucket.tile = name_of_own_kernel(task, fastest.own);
    return fastest;
  }

  // Rounded to bfloat16, few sums show another order: what differs in float32 is not used for it either.
  void compare_shared(const ProductTask& task, bool differs_in_f32, Bucket& bucket) {
    // A bias or a scale takes sums in float32.
    const SharedAlgorithm sums = shared_algorithm(this->task(task.rows, true));
    const SharedAlgorithm algorithm = sums.exists ? shared_algorithm(task) : sums;
    bucket.text = algorithm.text;
    if (!algorithm.exists) return;
    const ProductKernel kernel{true, 0};
    bucket.has_difference = differs_in_f32 || differing_row(task, kernel) >= 0;
    if (bucket.has_difference) return;
    bucket.shared_s = time_of(task, kernel);
    bucket.is_shared = bucket.shared_s <= bucket.own_s;
  }

  const ProofRequest& request_;
  int64_t columns_, most_rows_;
  bool has_residual_;
  OwnStream stream_;
  DeviceMemory x_, residual_, out_, expected_, differing_, planted_;
  std::unique_ptr<DeviceMemory> workspace_, flush_;
};

std::string json_of(const std::vector<Bucket>& buckets) {
  std::string text = "[";
  for (const Bucket& each : buckets) {
    if (text.size() > 1) text += ", ";
    text += "{\"rows\": " + std::to_string(each.rows) + ", \"result\": \"" + (each.is_f32 ? "float32" : "bfloat16") +
            "\", \"kernel\": \"" + (each.is_shared ? "cublasLt" : "own") +
            "\", \"tile\": \"" + each.tile + "\", \"cublaslt_differs\": " + (each.has_difference ? "true" : "false") + ", \"found\": \"" + each.text +
            "\", \"own_us\": " + std::to_string(each.own_s * 1e6) +
            ", \"cublaslt_us\": " + std::to_string(each.shared_s * 1e6) + "}";
  }
  return text + "]";
}

}  // namespace

std::string prove_product(const ProofRequest& request) {
  if (request.rows.empty()) throw std::invalid_argument("there are no numbers of rows to prove");
  const Context before = context;
  context = {};
  try {
    std::string found;
    {
      Proof proof(request);
      found = json_of(proof.run());
    }
    context = before;
    return found;
  } catch (...) {
    context = before;
    throw;
  }
}

}  // namespace cadenza::cuda
