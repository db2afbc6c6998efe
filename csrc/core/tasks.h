// The arguments of each operation as plain data: no XLA types, no ownership.
//
// T tokens, L logit rows, R rows, P pages of a row, S page size, Hq/Hkv heads, D head size, E
// hidden size, F intermediate size, V vocabulary, N/K columns and reduction of a weight, X experts,
// C experts chosen by each row. Slot s of a row is its s-th chosen expert; a pair is a row and a
// slot, with index row * C + s.
#pragma once

#include <cstdint>

#include "core/faults.h"
#include "core/logit_rows.h"
#include "core/types.h"

namespace cadenza {

// What multiplies the up projection. With kClampedSwiglu it is bounded, and 1 is added to it.
enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kClampedSwiglu = 3 };
constexpr int kNumActivations = 4;

struct LinearTask {
  int64_t rows, n, k;
  const void* x;          // activation dtype [rows, K]
  const void* w;          // packed in panels of 32 columns
  const float* bias;      // [N] or null
  const float* residual;  // [rows, N] or null; may alias `out`
  void* out;              // [rows, N], f32 or the activation dtype
  bool out_is_f32;
  float scale = 1.0f;  // multiplies product + bias, before the residual is added
};

struct GatedTask {
  int64_t rows, f, k;
  const void* x;      // [rows, K]
  const void* w;      // packed; each panel holds 16 gate columns, then 16 up columns
  const float* bias;  // [2, F]: gate bias, then up bias; or null
  Activation activation;
  void* out;  // activation dtype [rows, F]
};

// A choice of experts by sigmoids of the logits plus a bias, which the weights are without, among the
// groups of consecutive experts with the largest sums of their two best.
struct BiasedChoice {
  const float* bias = nullptr;  // [X]; null: the choice is by the logits
  int64_t num_groups = 1, num_chosen_groups = 1;
};

struct RouteTask {
  LinearTask product;  // n = X; residual and out unused
  int64_t num_chosen;
  bool over_chosen;  // the weights are divided by the sum of the chosen ones
  bool sigmoid;      // weights are sigmoids of the logits, in place of their softmax over all
  BiasedChoice choice;
  float scale;       // multiplies the weights
  float least_sum;   // added to the sum that divides the weights: sigmoids can all be 0
  const float* factors = nullptr;  // [X]: multiply the weights of each expert; or null
  int32_t* ids;      // [rows, C], in descending order of logits, ties to the lowest id
  float* weights;    // [rows, C]; NaN, with ids 0..C-1, if the largest logit is not finite
};

// The experts chosen by each row. Slots with an id outside [0, X) are skipped.
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
  const float* weights;  // [rows, C]: weight of each expert's output in the row's sum
};

// The product of each head's part of a row with a weight of the head's own.
struct HeadLinearTask {
  int64_t rows, heads, n, k;
  int64_t stride;  // elements of x from one head to the next; the first k are multiplied
  const void* x;   // activation dtype [rows, heads, stride]
  const void* w;   // [heads] packed weights
  void* out;       // activation dtype [rows, heads, N]
};

struct NormTask {
  int64_t rows, width;
  const float* x;       // [rows, width]
  const float* weight;  // [width]
  float eps;
  const float* residual;  // [rows, width] added after the norm, or null; may alias `out`
  void* out;              // activation dtype, or f32
  bool out_is_f32;
  const float* factor = nullptr;  // [1]: multiplies the sum; or null
};

// Rows of activation(x) times the elements [first, first + width) of a row of inputs.
struct GateTask {
  int64_t rows, width, input_width, first;
  const float* x;       // [rows, width]
  const float* inputs;  // [rows, input_width]
  Activation activation;
  void* out;  // activation dtype [rows, width]
};

// Rounds rows of f32 to the activation dtype.
struct ConvertTask {
  int64_t rows, width;
  const float* x;  // [rows, width]
  void* out;       // activation dtype [rows, width]
};

// Copies rows of any type. An index outside [0, num_sources) gives a row of zeros.
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

// What attention over latents (multi-head latent attention) reads in place of qkv. A token's key, D =
// L + rotary size values for all heads, is its normed latent and a rotated part; its value is the
// latent.
struct LatentInputs {
  const void* absorbed = nullptr;  // activation dtype [T, Hq, L]: queries times the keys' weights
  const void* queries = nullptr;   // activation dtype [T, Hq, query_size]: rotated at their ends
  const float* keys = nullptr;     // [T, D]: latents before their norm (k_weight), rotated at their ends
  int64_t query_size = 0;
  bool pairs_neighbours = true;    // elements 2 i and 2 i + 1 are rotated together, not two halves
};

struct AttendTask {
  int64_t rows, num_tokens, pages_per_row, page_size, num_pages;
  int64_t num_layers = 1, layer = 0;  // layers in the pools, and the layer to attend
  int64_t heads, kv_heads, head_size, rotary_size, rope_rows;
  bool has_query_factors = false;  // a last column of `rope`: what queries are multiplied by
  int64_t value_size;      // of a head's value; head_size but for latents
  int64_t head_parts = 1;  // units that share the query heads of a KV head
  float scale, soft_cap;   // soft_cap 0: none
  int64_t window;         // 0: none
  // Keys and values of qkv: 2 for both; 1 for keys, of which the values are made; 0 for queries alone,
  // with which nothing is appended.
  int64_t kv_parts = 2;
  bool norms_values = false;  // RMSNorm of each value head, without a weight
  const void* qkv;            // [T, (Hq + kv_parts Hkv) D]
  const int32_t* positions;       // in the row's KV
  const int32_t* rope_positions;  // rows of `rope`
  const int32_t* slot_mapping;
  const int32_t* query_starts;  // [R + 1]
  const int32_t* kv_lens;       // [R]
  const int32_t* reaches = nullptr;  // [T]: the last position that a token sees, if it is after its own; or null
  // [T]: the first position that a token sees with a window; -1: by positions. Or null.
  const int32_t* window_starts = nullptr;
  const int32_t* page_table;    // [R, P]
  const float* rope;            // [rope_rows, rope_columns()]: cosines, then sines
  const float* q_weight;        // [D], or [Hq D] with norm_spans_heads; or null
  const float* k_weight;        // [D], or [Hkv D] with norm_spans_heads; or null
  float norm_eps;
  bool norm_spans_heads;  // one RMS over all query heads of a token, and one over all key heads
  const float* sinks = nullptr;  // [Hq]: a score beside those of the tokens, whose value is 0; or null
  const void* gate = nullptr;    // activation dtype [T, Hq D]: its sigmoid multiplies the output; or null
  LatentInputs latent;           // in place of qkv; the pool of values is then null
  KvFormat kv_format = KvFormat::kActivations;
  void* k_pool;  // [num_pages, layers, Hkv, S, D]; layout of [S, D]: kernels/kv.h
  void* v_pool;
  void* out;  // [T, Hq D]

  // Query heads of a unit, and the units of each query.
  int64_t group() const { return heads / (kv_heads * head_parts); }
  int64_t unit_heads() const { return kv_heads * head_parts; }
  bool has_latents() const { return latent.absorbed != nullptr; }
  int64_t rope_columns() const { return rotary_size + (has_query_factors ? 1 : 0); }
  int64_t qkv_width() const { return (heads + kv_parts * kv_heads) * head_size; }
  // The first position that a token sees; ascends with the tokens of a row.
  int64_t begin_of_context(int64_t token) const {
    if (window == 0) return 0;
    if (window_starts != nullptr && window_starts[token] >= 0) return window_starts[token];
    const int64_t begin = positions[token] - window + 1;
    return begin > 0 ? begin : 0;
  }
  // The position behind the last one that a token sees; ascends with the tokens of a row.
  int64_t end_of_context(int64_t token) const {
    const int32_t position = positions[token];
    return (reaches != nullptr && reaches[token] > position ? reaches[token] : position) + 1;
  }
  // The head of qkv of which a value is made.
  int64_t value_head(int64_t kv_head) const { return heads + (kv_parts - 1) * kv_heads + kv_head; }

  // Offset by which a row's spans start before multiples of kSpan; 0 unless a fault is injected.
  int32_t span_shift(int64_t row) const {
    if (!has_fault(Fault::kRelativeSpans)) return 0;
    int32_t first = positions[query_starts[row]] / kLanes * kLanes;
    return (kSpan - first % kSpan) % kSpan;
  }
};

// A range of one row's queries for one KV head or a part of its query heads, over a range of the
// row's spans.
struct AttendUnit {
  int32_t row, unit_head;
  int32_t query_begin, query_end;  // within the row
  int32_t span_begin, span_end;
  int64_t partial;  // index of the unit's first partial result; -1: the unit writes the output
};

struct AttendPlan {
  const AttendTask* task;
  const AttendUnit* units;
  int64_t num_units;
  bool append_inside;  // each unit appends the new keys and values of its row and KV head
  float* partials;     // [.., value size + 2, padded to kLanes]: numerator, maximum, denominator
};

// The units of one query block whose (row, KV head) is split by spans; one unit per span.
struct MergeGroup {
  int64_t first_unit, num_units;
};

struct MergePlan {
  const AttendPlan* plan;
  const MergeGroup* groups;
};

// The rows of a step whose layer has a state, which is held in slots. Row r's tokens are
// [query_starts[r], query_starts[r + 1]).
struct StateRows {
  int64_t rows;
  const int32_t* query_starts;  // [R + 1]
  const int32_t* initial;       // [R]: the slot of the state before the row's first token; < 0: zeros
  const int32_t* kept;          // [T]: the slot that gets the state behind this token; < 0: none
  int64_t num_slots;
  int64_t num_layers = 1, layer = 0;  // layers in the pools, and the layer to compute

  int64_t begin(int64_t row) const { return query_starts[row]; }
  int64_t end(int64_t row) const { return query_starts[row + 1]; }
  int64_t num_tokens() const { return query_starts[rows]; }
  // Where a layer's state is within a pool whose layers have `size` elements each.
  int64_t place(int32_t slot, int64_t size) const { return (slot * num_layers + layer) * size; }
};

// A causal depthwise convolution of the newest `taps` inputs of each channel.
struct Convolution {
  StateRows state;
  int64_t channels, taps;
  const float* weight;          // [taps, channels], the oldest input first
  const float* bias = nullptr;  // [channels], or null
  void* pool;                   // activation dtype [slots, layers, taps - 1, channels]: the newest inputs
};

// A matrix of keys by values for each head of a layer with a state, in its slots.
struct StateMatrices {
  float* pool;  // [slots, layers, heads, values / 16, keys, 16]
  int64_t heads, keys, values;

  int64_t head_size() const { return keys * values; }
  int64_t width() const { return heads * values; }
};

// A gated delta net (Gated DeltaNet, arXiv 2412.06464): a causal depthwise convolution and SiLU over
// queries, keys and values, L2 norms of queries and keys, the gated delta rule, and an RMS norm of
// each head's output, which is multiplied by SiLU of a gate. Channels: the queries of all key heads,
// their keys, then the values of all value heads.
struct GatedDeltaTask {
  Convolution conv;
  StateMatrices matrices;    // of the value heads
  int64_t key_heads;
  bool tiled;                // value head h has key head h % key_heads; else consecutive ones share one
  const void* x;             // activation dtype [T, channels]
  const void* gate;          // activation dtype [T, value heads, value size]
  const float* rates;        // [T, 2, value heads]: the decay's input, then the write strength's
  const float* decay;        // [value heads]: -exp(A_log)
  const float* decay_bias;   // [value heads]
  const float* norm_weight;  // [value size]
  float norm_eps;
  float* mixed;  // scratch [T, channels]
  void* out;     // activation dtype [T, value heads, value size]

  int64_t key_width() const { return key_heads * matrices.keys; }
  int64_t num_channels() const { return 2 * key_width() + matrices.width(); }
  int64_t key_head(int64_t value_head) const {
    return tiled ? value_head % key_heads : value_head / (matrices.heads / key_heads);
  }
};

// A gated short convolution (LFM2): C * conv(B * x), with B, C and x beside each other in the input.
struct ShortConvTask {
  Convolution conv;
  const void* x;  // activation dtype [T, 3, channels]: B, C, x
  void* out;      // activation dtype [T, channels]
};

// A selective scan with one decay a head (Mamba-2, arXiv 2405.21060): a causal depthwise convolution
// and SiLU over values x, keys B and queries C; S = exp(dt A) S + B (dt x), y = C S + D x; y times SiLU
// of a gate, and an RMS norm of each group. Channels: the values of all heads, the keys of all groups,
// then their queries; consecutive heads share a group.
struct SelectiveScanTask {
  Convolution conv;
  StateMatrices matrices;
  int64_t groups;
  const void* x;             // activation dtype [T, channels]
  const void* gate;          // activation dtype [T, heads, values]
  const float* rates;        // [T, heads]: dt before its bias and softplus
  const float* decay;        // [heads]: A, which is -exp(A_log)
  const float* rate_bias;    // [heads]
  const float* skip;         // [heads]: D
  const float* norm_weight;  // [heads, values]
  float norm_eps;
  float* mixed;  // scratch [T, channels]
  float* gated;  // scratch [T, heads, values]
  void* out;     // activation dtype [T, heads, values]

  int64_t num_channels() const { return matrices.width() + 2 * groups * matrices.keys; }
};

// Scores of the keys of prompts, each by the last token of its row: the weights of a layer's attention
// to the prompt's keys alone, averaged over kPool keys, of which those outside count as 0; the largest
// of all heads, and of the layers of a step.
struct ScoreTask {
  AttendTask attend;          // without a window; queries and keys alone are read
  const int32_t* score_lens;  // [R]: the keys that are scored; 0: none
  bool is_first, is_last;     // of the step's layers that score
  int64_t stride;             // keys of a row of `best` and `sums`, a multiple of kLanes
  float* best;                // [R, stride]: of the layers so far, before the division by kPool
  // [R, stride]: the last layer adds the scores to those of the row's queries before it, or begins
  // with them if the query is the last of the keys.
  float* sums;

  bool scores(int64_t row) const {
    return score_lens[row] > 0 && attend.query_starts[row + 1] > attend.query_starts[row];
  }
};

// One thread's running argmax over one row's logits.
struct RowBest {
  float value;
  int32_t id;
  uint32_t largest_bits;  // largest |logit| as bits: >= 0x7f800000 if any is not finite
};
// RowBests between those of two threads, which then share no cache line.
constexpr int64_t best_stride(int64_t rows) { return round_up(rows, 16); }
static_assert(16 * sizeof(RowBest) % 64 == 0);

// The model's logit transforms, applied before sampling and logprobs. Both are monotonic.
struct LogitTransform {
  float divisor = 1.0f;
  float soft_cap = 0.0f;  // cap * tanh(logit / cap); 0: none
};

struct LogitsTask {
  LinearTask product;  // rows = L, n = V; `out` unused
  LogitTransform transform;
  RowBest* best;       // [threads, best_stride(L)]
  float* const* kept;  // [L]: where to store the row's logits; null: they are not needed
  int64_t banned = kNoToken;  // no row's argmax
};

struct SampledRow {
  float* logits;  // [V], padded to 32; rules modify them and then restore them
  SampleParams params;
  int32_t* out;  // [kSampleColumns]
};

// Columns of a row's result: token id, row state, logprob bits, rank, top ids, top logprob bits.
constexpr int kColumnToken = 0, kColumnState = 1, kColumnLogprob = 2, kColumnRank = 3;
constexpr int kColumnTop = 4;
constexpr int kSampleColumns = kColumnTop + 2 * kTopLogprobs;

// Row states: a logit is not finite; a token was selected; the rules ban every token.
constexpr int32_t kStateNotFinite = 0, kStateChosen = 1, kStateNoneAllowed = 2;

struct SampleTask {
  int64_t vocab;
  const SampledRow* rows;
  int64_t banned = kNoToken;  // no candidate of any row
};

}  // namespace cadenza
