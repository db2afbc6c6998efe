// The operations: each cuts its task into units, and shares them between threads.
//
// How work is cut is decided here and never reaches a result: kernels fix every reduction's order.
#pragma once

#include "core/cut.h"
#include "core/kernel_table.h"
#include "core/pool.h"
#include "core/tasks.h"

namespace cadenza {

// Where an operation runs.
struct Runtime {
  const KernelTable& kernels;
  Executor& executor;
};

// How a product is cut where it runs.
inline CutFor cut_for(const Runtime& runtime, const Executor::Lease& lease) {
  return {runtime.kernels.max_rows, lease.num_threads()};
}

void linear(const Runtime& runtime, DType dtype, const LinearTask& task);
void gated_linear(const Runtime& runtime, DType dtype, const GatedTask& task);
void rms_norm(const Runtime& runtime, DType dtype, const NormTask& task);
void embed(const Runtime& runtime, DType dtype, const EmbedTask& task);
// By the calling thread alone: a step takes few rows.
void take_rows(const TakeTask& task);

// Mixtures of experts. Rows are gathered by expert, so each expert's weight is read once.
void route_experts(const Runtime& runtime, DType dtype, const RouteTask& task);
void grouped_gated_linear(const Runtime& runtime, DType dtype, const GroupedGatedTask& task);
void grouped_linear(const Runtime& runtime, DType dtype, const GroupedLinearTask& task);
// How many experts at least one row chose.
int64_t count_active_experts(const ExpertChoice& choice, int64_t rows);

void rope_append_attend(const Runtime& runtime, DType dtype, const AttendTask& task);

// Chooses a token for each row of `product`'s activations. `out` is [rows, kSampleColumns].
struct NextTokenTask {
  LinearTask product;          // n = V; bias, residual and out unused
  const SampleParams* params;  // [rows]
  int32_t* out;
  LogitShape shape;
};
void next_token(const Runtime& runtime, DType dtype, const NextTokenTask& task);

}  // namespace cadenza
