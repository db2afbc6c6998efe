// The kernels of one ISA. Each computes work units [begin, end) of an operation; the comment at the
// kernel defines its unit. Arrays of products and of the embedding are indexed by WeightFormat, the
// others by the activations' DType: 0 bf16, 1 f32.
#pragma once

#include "core/encoder_tasks.h"
#include "core/pool.h"
#include "core/tasks.h"

namespace cadenza {

// A matrix product partitioned into units: unit i is panel i % panels and row block i / panels, so
// consecutive units read the same rows.
struct Grid {
  int64_t rows, k, panels, row_blocks;
  int64_t units() const { return panels * row_blocks; }
};

struct LinearUnits {
  const LinearTask* task;
  Grid grid;
};
struct GatedUnits {
  const GatedTask* task;
  Grid grid;
};

struct RouteUnits {
  const RouteTask* task;
  const float* logits;  // [rows, X]
};

// The channels of a unit of a convolution over all channels of a layer.
constexpr int64_t kConvChannels = 64;

// The pairs routed to one expert.
struct ExpertGroup {
  int64_t expert;
  int64_t first, rows;  // range within the gathered rows
  int64_t first_unit;
  Grid grid;
};
struct ExpertGroups {
  const ExpertGroup* groups;
  int64_t num_groups;
  const int32_t* pairs;  // [gathered rows]: the pair of each
  const void* x;         // gathered rows
};
struct GroupedGatedUnits {
  const GroupedGatedTask* task;
  ExpertGroups experts;
};
// The panels of a block, whose partial results are combined before those of the next.
struct GroupedLinearUnits {
  const GroupedLinearTask* task;
  ExpertGroups experts;
  int64_t first_panel, num_panels;
  float* partials;  // [pairs, 32 num_panels]
};
struct HeadLinearUnits {
  const HeadLinearTask* task;
  ExpertGroups heads;
};

// The scores of one row's keys, in spans; S spans.
struct ScorePlan {
  const ScoreTask* task;
  const AttendTask* attend;  // of which a row's context is the keys that are scored
  int64_t row, num_spans;
  bool begins;     // the row's scores begin with these
  float* weights;  // [Hq, S, 512], not normalised
  float* maxima;   // [Hq, span_stride()]: of each span's scores
  float* sums;     // [Hq, span_stride()]: of each span's weights, then what normalises them

  int64_t length() const { return task->score_lens[row]; }
  int64_t span_stride() const { return round_up(num_spans, kLanes); }
  float* weights_of(int64_t head) const { return weights + head * num_spans * kSpan; }
  float* maxima_of(int64_t head) const { return maxima + head * span_stride(); }
  float* sums_of(int64_t head) const { return sums + head * span_stride(); }
};

// The products of e4m3 weights, indexed by the activations' DType.
struct Float8Kernels {
  int max_rows;  // rows of one register tile
  UnitFn linear[2];
  UnitFn gated[2];
  UnitFn logits[2];
  UnitFn grouped_gated[2];
  UnitFn grouped_linear[2];
  UnitFn combine[2];  // its partial results
  UnitFn head_linear[2];
};

// Operations of image towers, indexed by the activations' DType.
struct EncoderKernels {
  UnitFn layer_norm[2];
  UnitFn activate[2];
  UnitFn keep_heads[2];
  UnitFn encode[2];
  UnitFn place[2];
};

struct KernelTable {
  const char* isa;
  int max_rows[2];  // rows of one register tile
  UnitFn linear[2];
  UnitFn gated[2];
  UnitFn norm[2];
  UnitFn gate[2];
  UnitFn convert[2];
  UnitFn embed[2];
  UnitFn append[2];
  UnitFn attend[2];
  UnitFn append_latents[2];
  UnitFn attend_latents[2];
  UnitFn merge[2];
  UnitFn weigh_keys[2];  // of ScorePlan: the weights of each span,
  UnitFn normalise;      // what normalises them,
  UnitFn pool_weights;   // and the scores
  UnitFn delta_convolve[2];  // of GatedDeltaTask: queries, keys and values
  UnitFn gated_delta[2];     // and what follows from them
  UnitFn short_conv[2];
  UnitFn scan_convolve[2];  // of SelectiveScanTask: values, keys and queries,
  UnitFn selective_scan[2];  // the scan and its gate,
  UnitFn scan_norm[2];       // and the norm
  UnitFn logits[2];
  UnitFn sample;
  UnitFn route;
  UnitFn grouped_gated[2];
  UnitFn grouped_linear[2];
  UnitFn combine[2];  // its partial results
  UnitFn head_linear[2];
  UnitFn read;  // read and multiply only measure the roofline
  UnitFn multiply[2];
  Float8Kernels float8;
  EncoderKernels encoder;
};

// The kernels of quantised products and of attention over KV in int8, whose ISA is selected on its
// own. Arrays are indexed by the activations' DType; a packed weight has its formats.
struct IntegerKernels {
  const char* isa;
  int max_rows;
  UnitFn quantise[2];
  UnitFn multiply;  // only measures the roofline
  UnitFn append[2];  // append, attend, merge and weigh_keys: attention over KV in int8
  UnitFn attend[2];
  UnitFn merge[2];
  UnitFn weigh_keys[2];
  UnitFn embed;
  UnitFn linear[2];
  UnitFn gated[2];
  UnitFn logits;
  UnitFn grouped_gated[2];
  UnitFn grouped_linear;
  UnitFn combine[2];  // its partial results
  UnitFn head_linear[2];
  // Of each format the rows of a unit from which tiles multiply it, measured at the first call; null
  // in tables without tiles.
  const int* (*least_tile_rows)();
};

// Of a format that is never multiplied by tiles.
constexpr int kNeverByTiles = 1 << 30;

}  // namespace cadenza
