#include "core/roofline.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace cadenza {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kStepsPerUnit = 1 << 12;
constexpr int64_t kUnitsPerThread = 256;
constexpr int64_t kMaxBlocks = 4;

double seconds_of(const Runtime& runtime, const Job& job) {
  Executor::Lease lease(runtime.executor);
  auto start = Clock::now();
  lease.run(job, true);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Small normal values, so that the sums neither overflow nor become denormal during a run.
void fill_seeds(DType dtype, uint32_t (&seeds)[kMultiplySeeds]) {
  for (int64_t i = 0; i < kMultiplySeeds; i++) {
    float value = 0x1p-6f * float(i % 7 + 1);
    uint32_t raw;
    std::memcpy(&raw, &value, sizeof(raw));
    seeds[i] = dtype == DType::kBf16 ? (raw >> 16) * 0x10001u : raw;
  }
}

}  // namespace

double measure_read(const Runtime& runtime, const void* data, int64_t bytes, int repeats) {
  ReadTask task{data};
  int64_t blocks = bytes / kReadBlock;
  double best = 0;
  for (int i = 0; i < repeats; i++) {
    double seconds = seconds_of(runtime, {runtime.kernels.read, &task, blocks, kMaxBlocks});
    best = std::max(best, double(blocks * kReadBlock) / seconds);
  }
  return best;
}

namespace {

double operations_per_second(const Runtime& runtime, UnitFn run, const void* seeds, int repeats) {
  double best = 0;
  for (int i = 0; i < repeats; i++) {
    int64_t operations = 0;
    MultiplyTask task{seeds, kStepsPerUnit, &operations};
    int64_t units = kUnitsPerThread * runtime.executor.num_threads();
    double seconds = seconds_of(runtime, {run, &task, units, 8});
    best = std::max(best, double(operations) / seconds);
  }
  return best;
}

}  // namespace

double measure_multiply(const Runtime& runtime, DType dtype, int repeats) {
  alignas(64) uint32_t seeds[kMultiplySeeds];
  fill_seeds(dtype, seeds);
  UnitFn run = runtime.kernels.multiply[static_cast<int>(dtype)];
  return operations_per_second(runtime, run, seeds, repeats);
}

double measure_multiply_codes(const Runtime& runtime, int repeats) {
  alignas(64) uint32_t seeds[kMultiplySeeds];
  fill_seeds(DType::kF32, seeds);
  return operations_per_second(runtime, runtime.integer.multiply, seeds, repeats);
}

}  // namespace cadenza
