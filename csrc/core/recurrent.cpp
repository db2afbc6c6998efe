// Layers with a state: their passes and units.
#include "core/ops.h"

namespace cadenza {

void gated_delta(const Runtime& runtime, DType dtype, const GatedDeltaTask& given) {
  const StateRows& state = given.conv.state;
  const int64_t tokens = state.num_tokens();
  if (tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  GatedDeltaTask task = given;
  task.mixed = lease.scratch().take<float>(tokens * task.conv.channels);
  const StateMatrices& matrices = task.matrices;
  const bool is_parallel = tokens * matrices.heads * matrices.head_size() > kMinParallelOps;
  const int64_t heads = 2 * task.key_heads + matrices.heads;
  lease.run({runtime.kernels.delta_convolve[index_of(dtype)], &task, state.rows * heads, 16},
            is_parallel);
  lease.run({runtime.kernels.gated_delta[index_of(dtype)], &task, state.rows * matrices.heads, 4},
            is_parallel);
}

void short_conv(const Runtime& runtime, DType dtype, const ShortConvTask& task) {
  const StateRows& state = task.conv.state;
  const int64_t tokens = state.num_tokens();
  if (tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  const int64_t ranges = ceil_div(task.conv.channels, kConvChannels);
  lease.run({runtime.kernels.short_conv[index_of(dtype)], &task, state.rows * ranges, 16},
            tokens * task.conv.channels * task.conv.taps > kMinParallelOps);
}

void selective_scan(const Runtime& runtime, DType dtype, const SelectiveScanTask& given) {
  const StateRows& state = given.conv.state;
  const int64_t tokens = state.num_tokens();
  if (tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  SelectiveScanTask task = given;
  const StateMatrices& matrices = task.matrices;
  task.mixed = lease.scratch().take<float>(tokens * task.conv.channels);
  task.gated = lease.scratch().take<float>(tokens * matrices.width());
  const bool is_parallel = tokens * matrices.heads * matrices.head_size() > kMinParallelOps;
  const int64_t ranges = ceil_div(task.conv.channels, kConvChannels);
  lease.run({runtime.kernels.scan_convolve[index_of(dtype)], &task, state.rows * ranges, 16},
            is_parallel);
  lease.run(
      {runtime.kernels.selective_scan[index_of(dtype)], &task, state.rows * matrices.heads, 4},
      is_parallel);
  lease.run({runtime.kernels.scan_norm[index_of(dtype)], &task, tokens, 16}, is_parallel);
}

}  // namespace cadenza
