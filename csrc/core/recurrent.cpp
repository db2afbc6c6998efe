// Layers with a state: their passes and units.
#include "core/ops.h"

namespace cadenza {

void gated_delta(const Runtime& runtime, DType dtype, const GatedDeltaTask& given) {
  const int64_t tokens = given.state.num_tokens();
  if (tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  GatedDeltaTask task = given;
  task.mixed = lease.scratch().take<float>(tokens * task.channels());
  const bool is_parallel = tokens * task.value_heads * task.head_state() > kMinParallelOps;
  const int64_t heads = 2 * task.key_heads + task.value_heads;
  lease.run({runtime.kernels.convolve[index_of(dtype)], &task, task.state.rows * heads, 16},
            is_parallel);
  lease.run({runtime.kernels.gated_delta[index_of(dtype)], &task,
             task.state.rows * task.value_heads, 4},
            is_parallel);
}

}  // namespace cadenza
