// What each operation needs, as plain data. No XLA types, no ownership.
//
// T tokens, L logit rows, R rows, P pages of a row, S page size, Hq/Hkv heads, D head size,
// E hidden size, F intermediate size, V vocabulary, N/K columns and reduction of a weight,
// X experts, C experts chosen by each row. Slot s of a row is its s-th choice; a pair is a row and
// a slot, numbered row * C + s.
#pragma once

#include <cstdint>

#include "core/faults.h"
#include "core/logit_rows.h"
#include "core/types.h"

namespace cadenza {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

struct LinearTask {
  int64_t rows, n, k;
  const void* x;          // activation dtype [rows, K]
  const void* w;          // packed [ceil(N/32), ceil(K/step), 32, step]
  const float* bias;      // [N] or null
  const float* residual;  // [rows, N] or null; may be `out`
  void* out;              // [rows, N], f32 or the activation dtype
  bool out_is_f32;
  float scale = 1.0f;  // of the product and its bias, before the residual
};

struct GatedTask {
  int64_t rows, f, k;
  const void* x;      // [rows, K]
  const void* w;      // packed, sixteen gate columns beside sixteen up columns in each panel
  const float* bias;  // [2, F]: of gate, then of up; or null
  Activation activation;
  void* out;  // activation dtype [rows, F]
};

struct RouteTask {
  LinearTask product;  // n = X; residual and out unused
  int64_t num_chosen;
  bool over_chosen;  // the softmax is over the chosen experts, not over all
  float scale;       // of the weights
  int32_t* ids;      // [rows, C], the largest logit first, ties to the lowest id
  float* weights;    // [rows, C]; a row without a finite largest logit gets NaN and ids 0..C-1
};

// Which experts each row chose. Nothing is computed for an id outside [0, X).
struct ExpertChoice {
  int64_t num_experts, num_chosen;
  const int32_t* ids;  // [rows, C]

  int64_t num_pairs(int64_t rows) const { return rows * num_chosen; }
  bool has_expert(int64_t pair) const { return ids[pair] >= 0 && ids[pair] < num_experts; }
};

struct GroupedGatedTask {
  GatedTask product;  // w [X] packed weights, bias [X, 2, F] or null, out [rows, C, F]
  ExpertChoice choice;
};

struct GroupedLinearTask {
  LinearTask product;  // x [rows, C, K], w [X] packed weights, bias [X, N] or null
  ExpertChoice choice;
  const float* weights;  // [rows, C], of each slot's result in the row's sum
};

struct NormTask {
  int64_t rows, width;
  const float* x;       // [rows, width]
  const float* weight;  // [width]
  float eps;
  const float* residual;  // [rows, width] added after the norm, or null; may be `out`
  void* out;              // activation dtype, or f32
  bool out_is_f32;
};

// Rows of any type, copied. An index outside [0, num_sources) gives a row of zeros.
struct TakeTask {
  int64_t rows, row_bytes, num_sources;
  const void* x;           // [num_sources, row_bytes]
  const int32_t* indices;  // [rows]
  void* out;               // [rows, row_bytes]
};

struct EmbedTask {
  int64_t rows, width, vocab;
  const int32_t* token_ids;  // [rows]; an id outside [0, V) gives a row of zeros
  const void* table;         // packed like a linear weight, or plain [V, width]
  bool packed;
  float scale;
  float* out;  // [rows, width]
};

struct AttendTask {
  int64_t rows, num_tokens, pages_per_row, page_size, num_pages;
  int64_t num_layers = 1, layer = 0;  // of the pools, and which of them attends
  int64_t heads, kv_heads, head_size, rotary_size, rope_rows;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  const void* qkv;        // [T, (Hq + 2 Hkv) D]
  const int32_t* positions;
  const int32_t* slot_mapping;
  const int32_t* query_starts;  // [R + 1]
  const int32_t* kv_lens;       // [R]
  const int32_t* page_table;    // [R, P]
  const float* rope;            // [rope_rows, rotary_size]: cosines, then sines
  const float* q_weight;        // [D], or [Hq D] where the norm spans all heads; or null
  const float* k_weight;        // [D], or [Hkv D]; or null
  float norm_eps;
  bool norm_spans_heads;  // one root mean square for all of a token's query heads, one for keys
  void* k_pool;           // [num_pages, layers, Hkv, S, D], private layout
  void* v_pool;
  void* out;  // [T, Hq D]

  int64_t group() const { return heads / kv_heads; }
  int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_size; }

  // How much earlier than multiples of kSpan a row's spans begin; 0, unless a fault is injected.
  int32_t span_shift(int64_t row) const {
    if (!has_fault(Fault::kRelativeSpans)) return 0;
    int32_t first = positions[query_starts[row]] / kLanes * kLanes;
    return (kSpan - first % kSpan) % kSpan;
  }
};

// Some queries of one row for one KV head, over some of its spans.
struct AttendUnit {
  int32_t row, kv_head;
  int32_t query_begin, query_end;  // within the row
  int32_t span_begin, span_end;
  int64_t partial;  // index of this unit's first partial result, or -1: write the output
};

struct AttendPlan {
  const AttendTask* task;
  const AttendUnit* units;
  int64_t num_units;
  bool append_inside;  // each unit owns its row's new keys and values
  float* partials;     // [.., D + 2]: numerator, maximum, denominator
};

// The units that one query block of a split (row, KV head) was cut into, one for each span.
struct MergeGroup {
  int64_t first_unit, num_units;
};

struct MergePlan {
  const AttendPlan* plan;
  const MergeGroup* groups;
};

// What one thread knows of one row's logits so far.
struct RowBest {
  float value;
  int32_t id;
  uint32_t largest_bits;  // largest |logit| as bits: >= 0x7f800000 when one is not finite
};

// What a model does to its logits before anybody reads them. Both keep their order.
struct LogitShape {
  float divisor = 1.0f;
  float soft_cap = 0.0f;  // cap * tanh(logit / cap); 0: none
};

struct LogitsTask {
  LinearTask product;  // rows = L, n = V; `out` unused
  LogitShape shape;
  RowBest* best;       // [threads, L]
  float* const* kept;  // [L]: where the row's logits go, or null where nobody reads them
};

struct SampledRow {
  float* logits;  // [V], padded to 16 lanes; as they were when the row is done
  SampleParams params;
  int32_t* out;  // [kSampleColumns]
};

// Columns of a row's result: token id, row state, logprob bits, rank, top ids, top logprob bits.
constexpr int kColumnToken = 0, kColumnState = 1, kColumnLogprob = 2, kColumnRank = 3;
constexpr int kColumnTop = 4;
constexpr int kSampleColumns = kColumnTop + 2 * kTopLogprobs;

// States of a row: a logit is not finite; a token was chosen; its rules allow no token.
constexpr int32_t kStateNotFinite = 0, kStateChosen = 1, kStateNoneAllowed = 2;

struct SampleTask {
  int64_t vocab;
  const SampledRow* rows;
};

}  // namespace cadenza
