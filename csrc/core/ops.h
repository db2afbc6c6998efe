// The operations. Each partitions its task into work units and runs them on the thread pool.
//
// Kernels fix the order of every reduction, so the partition never changes a result.
#pragma once

#include "core/encoder_tasks.h"
#include "core/partition.h"
#include "core/kernel_table.h"
#include "core/pool.h"
#include "core/tasks.h"

namespace cadenza {

// Where an operation runs.
struct Runtime {
  const KernelTable& kernels;
  const IntegerKernels& integer;
  Executor& executor;
};

void linear(const Runtime& runtime, ProductTypes types, const LinearTask& task);
void gated_linear(const Runtime& runtime, ProductTypes types, const GatedTask& task);
void rms_norm(const Runtime& runtime, DType dtype, const NormTask& task);
void gate_inputs(const Runtime& runtime, DType dtype, const GateTask& task);
void convert(const Runtime& runtime, DType dtype, const ConvertTask& task);
void embed(const Runtime& runtime, WeightFormat format, const EmbedTask& task);
// Runs on the calling thread: a step takes few rows.
void take_rows(const TakeTask& task);

// Mixture of experts. Rows are grouped by expert, so each expert's weight is read once.
void route_experts(const Runtime& runtime, ProductTypes types, const RouteTask& task);
void grouped_gated_linear(const Runtime& runtime, ProductTypes types,
                          const GroupedGatedTask& task);
void grouped_linear(const Runtime& runtime, ProductTypes types, const GroupedLinearTask& task);
// Multi-head latent attention: the absorbed weights of each head.
void head_linear(const Runtime& runtime, ProductTypes types, const HeadLinearTask& task);
// Number of experts chosen by at least one row.
int64_t count_active_experts(const ExpertChoice& choice, int64_t rows);

// Layers with a state update the pools: a slot that a row keeps may be the one that it begins with, and none that another
// row of the step begins with.
void gated_delta(const Runtime& runtime, DType dtype, const GatedDeltaTask& task);
void short_conv(const Runtime& runtime, DType dtype, const ShortConvTask& task);
void selective_scan(const Runtime& runtime, DType dtype, const SelectiveScanTask& task);

// Image towers.
void layer_norm(const Runtime& runtime, DType dtype, const LayerNormTask& task);
void activate(const Runtime& runtime, DType dtype, const ActivateTask& task);
void keep_heads(const Runtime& runtime, DType dtype, const KeepHeadsTask& task);
void encode_attend(const Runtime& runtime, DType dtype, const EncodeTask& task);
void place_rows(const Runtime& runtime, DType dtype, const PlaceRowsTask& task);
// Runs on the calling thread.
void keep_rows(const KeepRowsTask& task);

void rope_append_attend(const Runtime& runtime, DType dtype, const AttendTask& task);

// Scores are in `best` and `sums` of rows that score; others are left as they are.
void score_keys(const Runtime& runtime, DType dtype, const ScoreTask& task);

// Selects a token for each row of `product.x`; with a target or logprobs, also reports its logprob.
struct NextTokenTask {
  LinearTask product;          // n = V; bias, residual and out unused
  const SampleParams* params;  // [rows]
  int32_t* out;                // [rows, kSampleColumns]
  LogitTransform transform;
  int64_t banned = kNoToken;  // a token that no row chooses
};
void next_token(const Runtime& runtime, ProductTypes types, const NextTokenTask& task);

}  // namespace cadenza
