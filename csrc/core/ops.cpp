#include "core/ops.h"

#include <algorithm>
#include <cstring>

#include "core/cut.h"

namespace cadenza {

void linear(const Runtime& runtime, DType dtype, const LinearTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  LinearUnits units{&task, count_row_blocks(task.rows, runtime.kernels.max_rows)};
  int64_t panels = ceil_div(task.n, kPanel);
  lease.run(
      {runtime.kernels.linear[index_of(dtype)], &units, panels * units.row_blocks, kMaxPanels},
      task.rows * task.n * task.k > kWorthSharingOps);
}

void gated_linear(const Runtime& runtime, DType dtype, const GatedTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  GatedUnits units{&task, count_row_blocks(task.rows, runtime.kernels.max_rows)};
  int64_t panels = ceil_div(task.f, kLanes);
  lease.run({runtime.kernels.gated[index_of(dtype)], &units, panels * units.row_blocks, kMaxPanels},
            task.rows * task.f * task.k > kWorthSharingOps);
}

void rms_norm(const Runtime& runtime, DType dtype, const NormTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.norm[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kWorthSharingElements);
}

void embed(const Runtime& runtime, DType dtype, const EmbedTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.embed[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kWorthSharingElements / 8);
}

namespace {

// The argmax of every thread's part: the largest value, ties to the lowest id.
RowBest merge_best(const RowBest* best, int threads, int64_t rows, int64_t row) {
  RowBest merged = best[row];
  for (int t = 1; t < threads; t++) {
    const RowBest& other = best[t * rows + row];
    bool better =
        other.value > merged.value || (other.value == merged.value && other.id < merged.id);
    if (better) merged.value = other.value, merged.id = other.id;
    merged.largest_bits = std::max(merged.largest_bits, other.largest_bits);
  }
  return merged;
}

bool needs_logits(const SampleParams& params) {
  return params.temperature > 0.0f || params.bias != nullptr || params.num_logprobs >= 0;
}

}  // namespace

void next_token(const Runtime& runtime, DType dtype, const NextTokenTask& task) {
  const int64_t rows = task.product.rows, vocab = task.product.n;
  if (rows == 0) return;
  Executor::Lease lease(runtime.executor);
  Arena& scratch = lease.scratch();
  const int threads = lease.num_threads();
  RowBest* best = scratch.take<RowBest>(threads * rows);
  std::fill(best, best + threads * rows, RowBest{-__builtin_inff(), 0x7fffffff, 0});
  float** kept = scratch.take<float*>(rows);
  SampledRow* sampled = scratch.take<SampledRow>(rows);
  int64_t num_sampled = 0;
  for (int64_t row = 0; row < rows; row++) {
    kept[row] = nullptr;
    if (!needs_logits(task.params[row])) continue;
    kept[row] = scratch.take<float>(round_up(vocab, kPanel));
    sampled[num_sampled++] = {kept[row], task.params[row], task.out + row * kSampleColumns};
  }
  LogitsTask logits{task.product, best, kept};
  lease.run({runtime.kernels.logits[index_of(dtype)], &logits, ceil_div(vocab, kPanel), kMaxPanels},
            rows * vocab * task.product.k > kWorthSharingOps);
  for (int64_t row = 0; row < rows; row++) {
    RowBest merged = merge_best(best, threads, rows, row);
    int32_t* out = task.out + row * kSampleColumns;
    std::memset(out, 0, kSampleColumns * sizeof(int32_t));
    out[kColumnToken] = merged.id < vocab ? merged.id : 0;
    out[kColumnFinite] = merged.largest_bits < 0x7f800000u;
  }
  SampleTask sample{vocab, sampled};
  lease.run({runtime.kernels.sample, &sample, num_sampled, 1}, num_sampled > 1);
}

}  // namespace cadenza
