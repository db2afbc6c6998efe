// Attention as XLA calls it; updates the donated KV pools in place. Conventions: csrc/README.md.
#include <algorithm>

#include "core/kv_codes.h"
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

// The shapes of attention over a KV pool; `contexts` are the tokens of each row.
template <class Call>
AttendTask shapes(const Call& c, const Any& contexts) {
  AttendTask task{};
  task.rows = dim(contexts, 0);
  task.pages_per_row = dim(c.page_table, 1);
  task.num_pages = dim(c.k_pool, 0);
  task.num_layers = dim(c.k_pool, 1);
  task.layer = c.layer;
  task.kv_heads = dim(c.k_pool, 2);
  task.page_size = dim(c.k_pool, 3);
  task.head_size = dim(c.k_pool, 4);
  if (c.k_pool.element_type() == ffi::U8) {
    task.kv_format = KvFormat::kInt8;
    task.head_size -= kv_code_bytes(0);
  }
  task.value_size = task.head_size;
  task.heads = c.heads;
  task.rope_rows = dim(c.rope, 0);
  task.rotary_size = dim(c.rope, 1) / 2 * 2;
  task.has_query_factors = dim(c.rope, 1) % 2 != 0;
  task.scale = c.scale;
  task.soft_cap = c.soft_cap;
  task.norm_eps = c.norm_eps;
  const int64_t kv_width = task.kv_heads * task.head_size;
  task.kv_parts = (dim(c.qkv, 1) - task.heads * task.head_size) / std::max<int64_t>(kv_width, 1);
  return task;
}

// The type of a pool's elements: that of the activations, where bf16 is u16, since XLA's own code
// copies bf16 by way of f32 on a CPU; or bytes.
ffi::DataType pool_type(const AttendTask& task, DType dtype) {
  if (task.kv_format == KvFormat::kInt8) return ffi::U8;
  return dtype == DType::kBf16 ? ffi::U16 : ffi::F32;
}

void check(const calls::rope_append_attend& c, const AttendTask& task, DType dtype) {
  const ffi::DataType expected = pool_type(task, dtype);
  require(c.k_pool.element_type() == expected && c.v_pool.element_type() == expected,
          "k_pool and v_pool must be u8, u16 beside bf16, or f32 beside f32");
  require(c.k_pool.dimensions() == c.v_pool.dimensions(),
          "k_pool and v_pool must have the same shape");
  require(task.layer >= 0 && task.layer < task.num_layers, "layer is outside the pools' layers");
  require(task.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(task.head_size > 0 && task.head_size % kLanes == 0 && task.head_size <= 512,
          "the head size must be a multiple of 16, at most 512");
  require(task.heads > 0 && task.heads % task.kv_heads == 0,
          "the number of heads must be a multiple of the number of KV heads");
  require(task.kv_parts >= 0 && task.kv_parts <= 2 && dim(c.qkv, 1) == task.qkv_width(),
          "qkv must be [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]");
  require(task.kv_parts != 1 || task.norms_values, "values that are made of keys must be normed");
  require(task.rotary_size <= task.head_size,
          "rope must be [positions, rotary size], the rotary size even and at most D; or one column "
          "more, the factors of the queries");
  int64_t q_width = task.norm_spans_heads ? task.heads * task.head_size : task.head_size;
  int64_t k_width = task.norm_spans_heads ? task.kv_heads * task.head_size : task.head_size;
  require((task.q_weight == nullptr || dim(c.q_weight, 0) == q_width) &&
              (task.k_weight == nullptr || dim(c.k_weight, 0) == k_width),
          "q_weight and k_weight must be f32 [D], or [Hq D] and [Hkv D]");
  require(task.sinks == nullptr || dim(c.sinks, 0) == task.heads, "sinks must be f32 [Hq] or empty");
  require(task.gate == nullptr || (element_type(c.gate) == dtype &&
                                   dim(c.gate, 0) >= task.num_tokens &&
                                   dim(c.gate, 1) == task.heads * task.head_size),
          "gate must have qkv's type, [T, Hq D], or be empty");
  require(task.reaches == nullptr || dim(c.reaches, 0) >= task.num_tokens,
          "reaches must be [T] or empty");
  require(task.window_starts == nullptr || dim(c.window_starts, 0) >= task.num_tokens,
          "window_starts must be [T] or empty");
  require(dim(c.query_starts, 0) == task.rows + 1, "query_starts must be [R + 1]");
  require(dim(c.rope_positions, 0) >= task.num_tokens, "rope_positions must be [T]");
  require(dim(c.page_table, 0) == task.rows, "page_table must be [R, P]");
  require(c.k_out.untyped_data() == c.k_pool.untyped_data() &&
              c.v_out.untyped_data() == c.v_pool.untyped_data(),
          "k_pool and v_pool must be donated and aliased to the results");
  require(task.num_tokens >= 0 && task.num_tokens <= dim(c.qkv, 0),
          "query_starts ends outside the padded tokens");
}

// qkv and rope of the step's tokens, and the cached keys and values within each row's window.
int64_t bytes_read(const AttendTask& task, DType dtype) {
  int64_t tokens = 0;
  for (int64_t row = 0; row < task.rows; row++) {
    int64_t queries = task.query_starts[row + 1] - task.query_starts[row];
    int64_t context = task.kv_lens[row];
    if (queries == 0) continue;
    tokens += task.window > 0 ? std::min(context, task.window + queries - 1) : context;
  }
  const bool has_codes = task.kv_format == KvFormat::kInt8;
  int64_t token = has_codes ? kv_code_bytes(task.head_size) : task.head_size * bytes_of(dtype);
  int64_t kv = 2 * tokens * task.kv_heads * token;
  int64_t rope = task.num_tokens * task.rotary_size * int64_t(sizeof(float));
  return kv + rope + task.num_tokens * task.qkv_width() * bytes_of(dtype);
}

}  // namespace

// cadenza_rope_append_attend: qkv act [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]; positions
// [T]; slot_mapping [T]; query_starts [R + 1]; kv_lens [R]; page_table [R, P]; rope f32 [positions,
// rotary size], or one column more; q_weight f32 [D], [Hq D] or [0]; k_weight f32 [D], [Hkv D] or
// [0]; k_pool and v_pool act [pages, layers,
// Hkv, S, D], bf16 as its bits in u16, or u8 [pages, layers, Hkv, S, D + 4] for KV in int8
// (core/kv_codes.h); sinks f32 [Hq] or [0]; gate act [T, Hq D] or [0]; rope_positions [T], rows of rope;
// reaches [T] or [0]; window_starts [T] or [0].
// Results act [T, Hq D], and both pools, which must be donated and alias operands 9 and 10. Attributes:
// layer i64; heads i64; scale f32; window i64, 0 none; soft_cap f32, 0 none; norm_eps f32; norms_values
// bool.
//
// Without values in qkv they are made of the keys before their norm and rotation; without keys, too,
// nothing is appended, and the pools have what another layer wrote. With norms_values each value head
// has an RMSNorm without a weight.
//
// The number of tokens is query_starts[R]; padding rows repeat that value. Row r's queries are the
// tokens [query_starts[r], query_starts[r + 1]). A query at position p attends to KV positions
// [max(0, p - window + 1), min(e, kv_lens[r])), which must be covered by the row's pages; e is p + 1,
// or its reach + 1 if that is more. With a window, a window start that is not negative is the first
// position. What a row's tokens reach ascends, and so do their window starts. Keys
// and values are written for tokens with slot_mapping >= 0. A q or k weight of D values applies
// RMSNorm to each head; one of Hq D or Hkv D values applies it to all query heads, or all key
// heads, of a token together. With a rotary size of 0 nothing is rotated. Where rope has an odd number
// of columns, the last one has the factor of the queries of each position. A head's sink is a score
// beside those of its tokens, with a value of 0. The sigmoid of the gate multiplies the result.
void execute(const calls::rope_append_attend& c) {
  ProfileScope profile(c.kOp);
  AttendTask task = shapes(c, c.kv_lens);
  task.window = c.window;
  task.norms_values = c.norms_values;
  DType dtype = element_type(c.qkv);
  task.qkv = c.qkv.untyped_data();
  task.positions = int32(c.positions);
  task.rope_positions = int32(c.rope_positions);
  task.slot_mapping = int32(c.slot_mapping);
  task.query_starts = int32(c.query_starts);
  task.kv_lens = int32(c.kv_lens);
  task.reaches = optional_int32(c.reaches);
  task.window_starts = optional_int32(c.window_starts);
  task.page_table = int32(c.page_table);
  task.rope = data<float>(c.rope);
  task.q_weight = optional_f32(c.q_weight);
  task.k_weight = optional_f32(c.k_weight);
  task.norm_spans_heads = task.q_weight != nullptr && dim(c.q_weight, 0) != task.head_size;
  task.sinks = optional_f32(c.sinks);
  task.gate = c.gate.element_count() == 0 ? nullptr : c.gate.untyped_data();
  task.k_pool = c.k_out.untyped_data();
  task.v_pool = c.v_out.untyped_data();
  task.out = c.out.untyped_data();
  task.num_tokens = task.query_starts[task.rows];
  check(c, task, dtype);
  if (profile.is_on()) profile.reads(bytes_read(task, dtype));
  rope_append_attend(runtime(), dtype, task);
}

namespace {

AttendTask latent_task(const calls::latent_attend& c) {
  AttendTask task{};
  task.rows = dim(c.kv_lens, 0);
  task.pages_per_row = dim(c.page_table, 1);
  task.num_pages = dim(c.pool, 0);
  task.num_layers = dim(c.pool, 1);
  task.layer = c.layer;
  task.kv_heads = 1;
  task.page_size = dim(c.pool, 3);
  task.head_size = dim(c.pool, 4);
  task.heads = c.heads;
  task.rope_rows = dim(c.rope, 0);
  task.rotary_size = dim(c.rope, 1);
  task.value_size = task.head_size - task.rotary_size;
  task.latent.query_size = c.heads > 0 ? dim(c.queries, 1) / c.heads : 0;
  task.num_tokens = int32(c.query_starts)[task.rows];
  return task;
}

void check_latents(const calls::latent_attend& c, const AttendTask& task, DType dtype) {
  require(c.pool.element_type() == pool_type(task, dtype) && dim(c.pool, 2) == 1,
          "the pool must be u16 beside bf16, or f32 beside f32, with one KV head");
  require(c.pool_out.untyped_data() == c.pool.untyped_data(),
          "the pool must be donated and aliased to the result");
  require(task.layer >= 0 && task.layer < task.num_layers, "layer is outside the pool's layers");
  require(task.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(task.head_size <= 1024 && task.value_size > 0 && task.value_size % kLanes == 0 &&
              task.rotary_size > 0 && task.rotary_size % kLanes == 0,
          "the latent and the rotary size must be multiples of 16, at most 1024 together");
  require(task.heads > 0 && dim(c.absorbed, 1) == task.heads * task.value_size,
          "absorbed must be [T, Hq L]");
  require(element_type(c.queries) == dtype && dim(c.queries, 1) % task.heads == 0 &&
              task.latent.query_size >= task.rotary_size,
          "queries must be [T, Hq Dq] of absorbed's type, Dq at least the rotary size");
  require(c.keys.element_type() == ffi::F32 && dim(c.keys, 1) == task.head_size,
          "keys must be f32 [T, L + rotary size]");
  require(dim(c.norm, 0) == task.value_size, "norm must be f32 [L]");
  require(dim(c.query_starts, 0) == task.rows + 1, "query_starts must be [R + 1]");
  require(dim(c.rope_positions, 0) >= task.num_tokens, "rope_positions must be [T]");
  require(dim(c.page_table, 0) == task.rows, "page_table must be [R, P]");
  require(task.num_tokens >= 0 && task.num_tokens <= dim(c.absorbed, 0) &&
              task.num_tokens <= dim(c.queries, 0) && task.num_tokens <= dim(c.keys, 0),
          "query_starts ends outside the padded tokens");
}

int64_t latent_bytes_read(const AttendTask& task, DType dtype) {
  int64_t contexts = 0;
  for (int64_t row = 0; row < task.rows; row++) {
    if (task.query_starts[row + 1] > task.query_starts[row]) contexts += task.kv_lens[row];
  }
  const int64_t of_queries = task.heads * (task.value_size + task.rotary_size) * bytes_of(dtype);
  return contexts * task.head_size * bytes_of(dtype) +
         task.num_tokens * (of_queries + task.head_size * int64_t(sizeof(float)));
}

}  // namespace

// cadenza_latent_attend: absorbed act [T, Hq L]; queries act [T, Hq Dq], each head rotated at its
// end; keys f32 [T, L + rotary size]: latents, and what is rotated; positions [T]; slot_mapping [T];
// query_starts [R + 1]; kv_lens [R]; page_table [R, P]; rope f32 [positions, rotary size]; norm f32
// [L], of latents; pool act [pages, layers, 1, S, L + rotary size], bf16 as its bits in u16;
// rope_positions [T], rows of rope. Results act [T, Hq L], and the pool, which must be donated and alias
// operand 10. Attributes: layer i64; heads i64; scale f32; norm_eps f32; pairs_neighbours bool.
//
// Attention of absorbed queries over normed latents (multi-head latent attention), which are keys
// and values of all heads; rows, positions and slots as for rope_append_attend. With
// pairs_neighbours elements 2 i and 2 i + 1 are rotated together, else those of two halves.
void execute(const calls::latent_attend& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.absorbed);
  AttendTask task = latent_task(c);
  check_latents(c, task, dtype);
  task.scale = c.scale;
  task.norm_eps = c.norm_eps;
  task.latent.absorbed = c.absorbed.untyped_data();
  task.latent.queries = c.queries.untyped_data();
  task.latent.keys = data<float>(c.keys);
  task.latent.pairs_neighbours = c.pairs_neighbours;
  task.positions = int32(c.positions);
  task.rope_positions = int32(c.rope_positions);
  task.slot_mapping = int32(c.slot_mapping);
  task.query_starts = int32(c.query_starts);
  task.kv_lens = int32(c.kv_lens);
  task.page_table = int32(c.page_table);
  task.rope = data<float>(c.rope);
  task.k_weight = optional_f32(c.norm);
  task.k_pool = c.pool_out.untyped_data();
  task.out = c.out.untyped_data();
  if (profile.is_on()) profile.reads(latent_bytes_read(task, dtype));
  rope_append_attend(runtime(), dtype, task);
}

namespace {

void check_scores(const Any& scores, const Any& out, const ScoreTask& task) {
  require(out.untyped_data() == scores.untyped_data(),
          "scores must be donated and aliased to the result");
  require(scores.dimensions().size() == 3 && dim(scores, 0) == 2 &&
              dim(scores, 1) == task.attend.rows && task.stride % kLanes == 0,
          "scores must be f32 [2, R, N], N a multiple of 16");
  for (int64_t row = 0; row < task.attend.rows; row++) {
    if (!task.scores(row)) continue;
    const int64_t query = task.attend.query_starts[row + 1] - 1;
    require(task.score_lens[row] <= task.stride &&
                task.score_lens[row] <= task.attend.positions[query] + 1,
            "a row scores keys that it does not have");
  }
}

// The keys that are scored.
int64_t key_bytes_read(const ScoreTask& task, DType dtype) {
  const AttendTask& attend = task.attend;
  int64_t keys = 0;
  for (int64_t row = 0; row < attend.rows; row++) keys += task.scores(row) ? task.score_lens[row] : 0;
  const bool has_codes = attend.kv_format == KvFormat::kInt8;
  const int64_t key = has_codes ? kv_code_bytes(attend.head_size) : attend.head_size * bytes_of(dtype);
  return keys * attend.kv_heads * key;
}

}  // namespace

// cadenza_score_keys: qkv, positions, query_starts, page_table, rope, q_weight, k_pool and
// rope_positions as for rope_append_attend, which has appended the step's keys; score_lens [R]; scores
// f32 [2, R, N], N a multiple of 16. The result aliases scores. Attributes: layer i64; heads i64; scale
// f32; soft_cap f32, 0 none; norm_eps f32; is_first bool; is_last bool.
//
// The last token of each row whose score_lens is n > 0 scores the keys before position n, by the
// softmax of its scores of these keys alone. scores[0] has the largest of the layers so far, from the
// one that is first on; the one that is last adds it, over 13, to scores[1], or sets that if the token
// is at position n - 1.
void execute(const calls::score_keys& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.qkv);
  ScoreTask task{};
  task.attend = shapes(c, c.score_lens);
  AttendTask& attend = task.attend;
  require(c.k_pool.element_type() == pool_type(attend, dtype), "k_pool must be u8, u16 beside bf16, or f32");
  require(attend.head_size % kLanes == 0 && attend.head_size <= 512 && attend.heads % attend.kv_heads == 0 &&
              dim(c.qkv, 1) == attend.qkv_width() && attend.layer < attend.num_layers,
          "qkv, k_pool, heads and layer must be those of rope_append_attend");
  attend.qkv = c.qkv.untyped_data();
  attend.positions = int32(c.positions);
  attend.rope_positions = int32(c.rope_positions);
  attend.query_starts = int32(c.query_starts);
  attend.page_table = int32(c.page_table);
  attend.rope = data<float>(c.rope);
  attend.q_weight = optional_f32(c.q_weight);
  attend.norm_spans_heads = attend.q_weight != nullptr && dim(c.q_weight, 0) != attend.head_size;
  attend.k_pool = c.k_pool.untyped_data();
  attend.num_tokens = attend.query_starts[attend.rows];
  task.score_lens = int32(c.score_lens);
  task.is_first = c.is_first;
  task.is_last = c.is_last;
  task.stride = dim(c.scores, 2);
  task.best = static_cast<float*>(c.out.untyped_data());
  task.sums = task.best + attend.rows * task.stride;
  check_scores(c.scores, c.out, task);
  if (profile.is_on()) profile.reads(key_bytes_read(task, dtype));
  score_keys(runtime(), dtype, task);
}

}  // namespace cadenza::xla_ffi
