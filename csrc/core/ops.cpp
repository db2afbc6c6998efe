#include "core/ops.h"

#include <algorithm>
#include <cstring>

#include "core/partition.h"
#include "core/quantised.h"

namespace cadenza {

namespace {

Weight weight_of(const void* packed, int64_t panels, int64_t k, WeightFormat format) {
  const char* data = static_cast<const char*>(packed);
  if (!is_quantised(format)) return {data, panels, panel_bytes(format, k)};
  // With panels of several sizes their average: a prefetch may begin anywhere.
  const CodesHeader& header = codes_header(packed);
  const int64_t at = header.panels_at();
  return {data + at, panels, (header.num_bytes() - at) / panels};
}

}  // namespace

void linear(const Runtime& runtime, ProductTypes types, const LinearTask& given) {
  if (given.rows == 0) return;
  const ProductKernels kernels = product_kernels(runtime, types);
  LinearTask task = given;
  Executor::Lease lease(runtime.executor);
  Weight next = lease.predict_next(weight_of(task.w, ceil_div(task.n, kPanel), task.k, types.weight));
  task.x = product_rows(runtime, lease, types, {task.rows, task.k, task.x, task.w});
  LinearUnits units{
      &task, partition_product(task.rows, task.k, ceil_div(task.n, kPanel),
                               {kernels.max_rows, lease.num_threads()})};
  lease.run({kernels.linear, &units, units.grid.units(), kMaxPanels, next},
            task.rows * task.n * task.k > kMinParallelOps);
}

void gated_linear(const Runtime& runtime, ProductTypes types, const GatedTask& given) {
  if (given.rows == 0) return;
  const ProductKernels kernels = product_kernels(runtime, types);
  GatedTask task = given;
  Executor::Lease lease(runtime.executor);
  Weight next = lease.predict_next(weight_of(task.w, ceil_div(task.f, kLanes), task.k, types.weight));
  task.x = product_rows(runtime, lease, types, {task.rows, task.k, task.x, task.w});
  GatedUnits units{
      &task, partition_product(task.rows, task.k, ceil_div(task.f, kLanes),
                               {kernels.max_rows, lease.num_threads()})};
  lease.run({kernels.gated, &units, units.grid.units(), kMaxPanels, next},
            task.rows * task.f * task.k > kMinParallelOps);
}

void rms_norm(const Runtime& runtime, DType dtype, const NormTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.norm[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements);
}

void gate_inputs(const Runtime& runtime, DType dtype, const GateTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.gate[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements / 4);
}

void convert(const Runtime& runtime, DType dtype, const ConvertTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.convert[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements);
}

void embed(const Runtime& runtime, WeightFormat format, const EmbedTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  const UnitFn run = is_quantised(format)
                         ? runtime.integer.embed
                         : runtime.kernels.embed[index_of(format)];
  lease.run({run, &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements / 8);
}

void take_rows(const TakeTask& task) {
  const auto* x = static_cast<const char*>(task.x);
  auto* out = static_cast<char*>(task.out);
  for (int64_t row = 0; row < task.rows; row++, out += task.row_bytes) {
    int64_t index = task.indices[row];
    if (index < 0 || index >= task.num_sources) {
      std::memset(out, 0, size_t(task.row_bytes));
    } else {
      std::memcpy(out, x + index * task.row_bytes, size_t(task.row_bytes));
    }
  }
}

namespace {

// Merges the threads' argmaxes: the largest value, ties to the lowest id.
RowBest merge_best(const RowBest* best, int threads, int64_t rows, int64_t row) {
  RowBest merged = best[row];
  for (int t = 1; t < threads; t++) {
    const RowBest& other = best[t * best_stride(rows) + row];
    bool better =
        other.value > merged.value || (other.value == merged.value && other.id < merged.id);
    if (better) merged.value = other.value, merged.id = other.id;
    merged.largest_bits = std::max(merged.largest_bits, other.largest_bits);
  }
  return merged;
}

bool needs_logits(const SampleParams& params) {
  return params.temperature > 0.0f || params.rules.record != nullptr || params.num_logprobs >= 0 ||
         params.target >= 0;
}

}  // namespace

void next_token(const Runtime& runtime, ProductTypes types, const NextTokenTask& task) {
  const int64_t rows = task.product.rows, vocab = task.product.n;
  if (rows == 0) return;
  Executor::Lease lease(runtime.executor);
  Arena& scratch = lease.scratch();
  const int threads = lease.num_threads();
  const int64_t num_best = threads * best_stride(rows);
  RowBest* best = scratch.take<RowBest>(num_best);
  std::fill(best, best + num_best, RowBest{-__builtin_inff(), 0x7fffffff, 0});
  float** kept = scratch.take<float*>(rows);
  SampledRow* sampled = scratch.take<SampledRow>(rows);
  int64_t num_sampled = 0;
  for (int64_t row = 0; row < rows; row++) {
    kept[row] = nullptr;
    if (!needs_logits(task.params[row])) continue;
    kept[row] = scratch.take<float>(round_up(vocab, kPanel));
    sampled[num_sampled++] = {kept[row], task.params[row], task.out + row * kSampleColumns};
  }
  LogitsTask logits{task.product, task.transform, best, kept, task.banned};
  const int64_t panels = ceil_div(vocab, kPanel);
  Weight next = lease.predict_next(weight_of(task.product.w, panels, task.product.k, types.weight));
  logits.product.x = product_rows(runtime, lease, types,
                                  {rows, task.product.k, task.product.x, task.product.w});
  lease.run({product_kernels(runtime, types).logits, &logits, panels, kMaxPanels, next},
            rows * vocab * task.product.k > kMinParallelOps);
  for (int64_t row = 0; row < rows; row++) {
    RowBest merged = merge_best(best, threads, rows, row);
    int32_t* out = task.out + row * kSampleColumns;
    std::memset(out, 0, kSampleColumns * sizeof(int32_t));
    out[kColumnToken] = merged.id < vocab ? merged.id : 0;
    out[kColumnState] = merged.largest_bits < 0x7f800000u ? kStateChosen : kStateNotFinite;
  }
  SampleTask sample{vocab, sampled, task.banned};
  lease.run({runtime.kernels.sample, &sample, num_sampled, 1}, num_sampled > 1);
}

}  // namespace cadenza
