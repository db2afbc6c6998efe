// Rates of the card.
#include "cuda/measure.h"

#include <algorithm>

#include "cuda/cublaslt_plan.h"
#include "cuda/device_memory.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr int kLoads = 8;     // of 16 bytes, on their way for each thread
constexpr int kChains = 8;    // sums of a warp that do not wait for one another
constexpr int kTrials = 8;    // the best counts: others are slower for reasons of their own

#ifdef CADENZA_EMULATED_GPU
constexpr size_t kBytes = 1 << 20;
constexpr int64_t kSide = 32;
constexpr int kSteps = 2;
#else
constexpr size_t kBytes = 1 << 30;  // several times any second-level cache
constexpr int64_t kSide = 8192;     // of a square product
constexpr int kSteps = 4096;
#endif
constexpr int kBlocksPerProcessor = 2;

// The launches of a measure, on a stream of their own.
class Measure {
 public:
  Measure() : before_(context) {
    context = {};
    stream_ = std::make_unique<OwnStream>();
  }
  ~Measure() {
    stream_.reset();
    context = before_;
  }
  Measure(const Measure&) = delete;
  Measure& operator=(const Measure&) = delete;

  // `work` a second, of the fastest trial; the first one is not counted.
  template <class Body>
  double rate(double work, const Body& body) const {
    body();
    double best = 0.0;
    for (int trial = 0; trial < kTrials; trial++) best = std::max(best, work / seconds_of(body));
    return best;
  }

 private:
  Context before_;
  std::unique_ptr<OwnStream> stream_;
};

unsigned num_processors() {
  int num = 1;
#ifndef CADENZA_EMULATED_GPU
  check(cudaDeviceGetAttribute(&num, cudaDevAttrMultiProcessorCount, current_device()));
#endif
  return unsigned(num);
}

// Each block reads consecutive memory. What is read is used in a comparison that never holds.
__global__ void __launch_bounds__(kThreads) read_all(const uint4* from, uint32_t* never) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  uint4 loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; i++) loaded[i] = load_constant(from + first + i * int64_t(kThreads));
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kLoads; i++) all |= loaded[i].x | loaded[i].y | loaded[i].z | loaded[i].w;
  if (all != 0) *never = all;
}

__global__ void __launch_bounds__(kThreads) multiply_bf16(float* never) {
  float sums[kChains][4] = {};
  const uint32_t a[4] = {threadIdx.x, 0, 0, 0}, b[2] = {0, threadIdx.x};
  for (int step = 0; step < kSteps; step++) {
#pragma unroll
    for (int i = 0; i < kChains; i++) warp_mma_bf16(sums[i], a, b);
  }
  float all = 0.0f;
  for (int i = 0; i < kChains; i++) all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (all > 1e30f) *never = all;
}

__global__ void __launch_bounds__(kThreads) multiply_int8(int32_t* never) {
  int32_t sums[kChains][4] = {};
  const uint32_t a[4] = {threadIdx.x & 1, 0, 0, 0}, b[2] = {0, threadIdx.x & 1};
  for (int step = 0; step < kSteps; step++) {
#pragma unroll
    for (int i = 0; i < kChains; i++) warp_mma_int8(sums[i], a, b);
  }
  int32_t all = 0;
  for (int i = 0; i < kChains; i++) all |= sums[i][0] | sums[i][1] | sums[i][2] | sums[i][3];
  if (all == 0x7fffffff) *never = all;
}

// Of all warps' steps of [16, k] times [k, 8].
double loop_work(double k) {
  const double warps = double(num_processors()) * kBlocksPerProcessor * kThreads / kWarp;
  return warps * kSteps * kChains * 2.0 * 16.0 * 8.0 * k;
}

template <class Sum>
double loop_rate(const Measure& measure, void (*kernel)(Sum*), double k) {
  const DeviceMemory never(sizeof(Sum));
  return measure.rate(loop_work(k), [&] {
    launch(kernel, dim3{num_processors() * kBlocksPerProcessor}, kThreads, 0, reinterpret_cast<Sum*>(never.data()));
  });
}

// Two bf16 of random signs and mantissas in a word, or four int8: equal ones would take less power,
// and so let the clock be higher.
__global__ void __launch_bounds__(kThreads) fill_varied(uint32_t* to) {
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  uint32_t word = (at ^ at >> 16) * 0x7feb352du;
  word = (word ^ word >> 15) * 0x846ca68bu;
  to[at] = (word & 0x807f807fu) | 0x3f803f80u;
}

// By cublasLt; 0 where it has no algorithm.
double shared_rate(const Measure& measure, SharedTypes types) {
  if (cublaslt() == nullptr) return 0.0;
  try {
    const SharedPlan plan({kSide, kSide, kSide, types}, false);
    if (!plan.algorithm().exists) return 0.0;
    const DeviceMemory x(kSide * kSide * 2), w(kSide * kSide * 2), out(kSide * kSide * 4);
    for (const DeviceMemory* operand : {&x, &w}) {
      launch(fill_varied, dim3{unsigned(kSide * kSide / 2 / kThreads)}, kThreads, 0,
             reinterpret_cast<uint32_t*>(operand->data()));
    }
    const double side = double(kSide);
    return measure.rate(2.0 * side * side * side, [&] { plan.run(w.data(), x.data(), nullptr, out.data()); });
  } catch (const std::runtime_error&) {  // a type that this card's cublasLt refuses
    return 0.0;
  }
}

}  // namespace

double read_rate() {
  const Measure measure;
  const DeviceMemory from(kBytes), never(sizeof(uint32_t));
  fill_bytes(from.data(), 0, kBytes);
  constexpr size_t kBlockBytes = sizeof(uint4) * kThreads * kLoads;
  return measure.rate(double(kBytes), [&] {
    launch(read_all, dim3{unsigned(kBytes / kBlockBytes)}, kThreads, 0, reinterpret_cast<const uint4*>(from.data()),
           reinterpret_cast<uint32_t*>(never.data()));
  });
}

double copy_rate() {
  const Measure measure;
  const DeviceMemory from(kBytes / 2), to(kBytes / 2);
  fill_bytes(from.data(), 0, kBytes / 2);
  return measure.rate(double(kBytes), [&] { copy_on_device(to.data(), from.data(), kBytes / 2); });
}

double bf16_rate() {
  const Measure measure;
  return std::max(loop_rate(measure, multiply_bf16, 16.0), shared_rate(measure, SharedTypes::kBf16ToBf16));
}

double int8_rate() {
  const Measure measure;
  return std::max(loop_rate(measure, multiply_int8, 32.0), shared_rate(measure, SharedTypes::kInt8ToInt32));
}

}  // namespace cadenza::cuda
