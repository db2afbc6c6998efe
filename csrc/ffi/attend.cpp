// Attention as XLA calls it; updates the donated KV pools in place. Conventions: csrc/README.md.
#include <algorithm>

#include "core/kv_codes.h"
#include "ffi/targets.h"

namespace cadenza::xla_ffi {

namespace {

struct AttendAttrs {
  int64_t layer, heads, window;
  float scale, soft_cap, norm_eps;
  bool norms_values;
};

struct AttendBuffers {
  Any qkv, positions, slot_mapping, query_starts, kv_lens, page_table, rope, q_weight, k_weight,
      k_pool, v_pool, sinks, gate, rope_positions, reaches, window_starts, out, k_out, v_out;
};

AttendTask shapes(const AttendBuffers& b, const AttendAttrs& attrs) {
  AttendTask task{};
  task.rows = dim(b.kv_lens, 0);
  task.pages_per_row = dim(b.page_table, 1);
  task.num_pages = dim(b.k_pool, 0);
  task.num_layers = dim(b.k_pool, 1);
  task.layer = attrs.layer;
  task.kv_heads = dim(b.k_pool, 2);
  task.page_size = dim(b.k_pool, 3);
  task.head_size = dim(b.k_pool, 4);
  if (b.k_pool.element_type() == ffi::U8) {
    task.kv_format = KvFormat::kInt8;
    task.head_size -= kv_code_bytes(0);
  }
  task.value_size = task.head_size;
  task.heads = attrs.heads;
  task.rope_rows = dim(b.rope, 0);
  task.rotary_size = dim(b.rope, 1) / 2 * 2;
  task.has_query_factors = dim(b.rope, 1) % 2 != 0;
  task.scale = attrs.scale;
  task.soft_cap = attrs.soft_cap;
  task.window = attrs.window;
  task.norm_eps = attrs.norm_eps;
  task.norms_values = attrs.norms_values;
  const int64_t kv_width = task.kv_heads * task.head_size;
  task.kv_parts = (dim(b.qkv, 1) - task.heads * task.head_size) / std::max<int64_t>(kv_width, 1);
  return task;
}

// The type of a pool's elements: that of the activations, where bf16 is u16, since XLA's own code
// copies bf16 by way of f32 on a CPU; or bytes.
ffi::DataType pool_type(const AttendTask& task, DType dtype) {
  if (task.kv_format == KvFormat::kInt8) return ffi::U8;
  return dtype == DType::kBf16 ? ffi::U16 : ffi::F32;
}

void check(const AttendBuffers& b, const AttendTask& task, DType dtype) {
  const ffi::DataType expected = pool_type(task, dtype);
  require(b.k_pool.element_type() == expected && b.v_pool.element_type() == expected,
          "k_pool and v_pool must be u8, u16 beside bf16, or f32 beside f32");
  require(b.k_pool.dimensions() == b.v_pool.dimensions(),
          "k_pool and v_pool must have the same shape");
  require(task.layer >= 0 && task.layer < task.num_layers, "layer is outside the pools' layers");
  require(task.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(task.head_size > 0 && task.head_size % kLanes == 0 && task.head_size <= 512,
          "the head size must be a multiple of 16, at most 512");
  require(task.heads > 0 && task.heads % task.kv_heads == 0,
          "the number of heads must be a multiple of the number of KV heads");
  require(task.kv_parts >= 0 && task.kv_parts <= 2 && dim(b.qkv, 1) == task.qkv_width(),
          "qkv must be [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]");
  require(task.kv_parts != 1 || task.norms_values, "values that are made of keys must be normed");
  require(task.rotary_size <= task.head_size,
          "rope must be [positions, rotary size], the rotary size even and at most D; or one column "
          "more, the factors of the queries");
  int64_t q_width = task.norm_spans_heads ? task.heads * task.head_size : task.head_size;
  int64_t k_width = task.norm_spans_heads ? task.kv_heads * task.head_size : task.head_size;
  require((task.q_weight == nullptr || dim(b.q_weight, 0) == q_width) &&
              (task.k_weight == nullptr || dim(b.k_weight, 0) == k_width),
          "q_weight and k_weight must be f32 [D], or [Hq D] and [Hkv D]");
  require(task.sinks == nullptr || dim(b.sinks, 0) == task.heads, "sinks must be f32 [Hq] or empty");
  require(task.gate == nullptr || (element_type(b.gate) == dtype &&
                                   dim(b.gate, 0) >= task.num_tokens &&
                                   dim(b.gate, 1) == task.heads * task.head_size),
          "gate must have qkv's type, [T, Hq D], or be empty");
  require(task.reaches == nullptr || dim(b.reaches, 0) >= task.num_tokens,
          "reaches must be [T] or empty");
  require(task.window_starts == nullptr || dim(b.window_starts, 0) >= task.num_tokens,
          "window_starts must be [T] or empty");
  require(dim(b.query_starts, 0) == task.rows + 1, "query_starts must be [R + 1]");
  require(dim(b.rope_positions, 0) >= task.num_tokens, "rope_positions must be [T]");
  require(dim(b.page_table, 0) == task.rows, "page_table must be [R, P]");
  require(b.k_out.untyped_data() == b.k_pool.untyped_data() &&
              b.v_out.untyped_data() == b.v_pool.untyped_data(),
          "k_pool and v_pool must be donated and aliased to the results");
  require(task.num_tokens >= 0 && task.num_tokens <= dim(b.qkv, 0),
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

void attend(const AttendBuffers& b, const AttendAttrs& attrs) {
  ProfileScope profile(Op::kRopeAppendAttend);
  AttendTask task = shapes(b, attrs);
  DType dtype = element_type(b.qkv);
  task.qkv = b.qkv.untyped_data();
  task.positions = int32(b.positions);
  task.rope_positions = int32(b.rope_positions);
  task.slot_mapping = int32(b.slot_mapping);
  task.query_starts = int32(b.query_starts);
  task.kv_lens = int32(b.kv_lens);
  task.reaches = optional_int32(b.reaches);
  task.window_starts = optional_int32(b.window_starts);
  task.page_table = int32(b.page_table);
  task.rope = data<float>(b.rope);
  task.q_weight = optional_f32(b.q_weight);
  task.k_weight = optional_f32(b.k_weight);
  task.norm_spans_heads = task.q_weight != nullptr && dim(b.q_weight, 0) != task.head_size;
  task.sinks = optional_f32(b.sinks);
  task.gate = b.gate.element_count() == 0 ? nullptr : b.gate.untyped_data();
  task.k_pool = b.k_out.untyped_data();
  task.v_pool = b.v_out.untyped_data();
  task.out = b.out.untyped_data();
  task.num_tokens = task.query_starts[task.rows];
  check(b, task, dtype);
  if (profile.is_on()) profile.reads(bytes_read(task, dtype));
  rope_append_attend(runtime(), dtype, task);
}

}  // namespace

// cadenza_rope_append_attend: qkv act [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]; positions
// [T]; slot_mapping [T]; query_starts [R + 1]; kv_lens [R]; page_table [R, P]; rope f32 [positions,
// rotary size], or one column more; q_weight f32 [D], [Hq D] or [0]; k_weight f32 [D], [Hkv D] or
// [0]; k_pool and v_pool act [pages, layers,
// Hkv, S, D], bf16 as its bits in u16, or u8 [pages, layers, Hkv, S, D + 4] for KV in int8
// (core/kv_codes.h); sinks f32 [Hq] or [0]; gate act [T, Hq D] or [0]; rope_positions [T], rows of rope;
// reaches [T] or [0]; window_starts [T] or [0].
// Results act [T, Hq D], and both pools, which must be donated and alias operands 9 and 10. Attributes: layer i64; heads i64; scale f32; window i64, 0 none; soft_cap f32, 0 none;
// norm_eps f32; norms_values bool.
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
ffi::Error rope_append_attend_call(Any qkv, Any positions, Any slot_mapping, Any query_starts, Any kv_lens,
                       Any page_table, Any rope, Any q_weight, Any k_weight, Any k_pool, Any v_pool,
                       Any sinks, Any gate, Any rope_positions, Any reaches, Any window_starts,
                       AnyResult out, AnyResult k_out, AnyResult v_out, int64_t layer, int64_t heads, float scale, int64_t window, float soft_cap, float norm_eps,
                       bool norms_values) {
  return guarded("cadenza_rope_append_attend", [&] {
    attend({qkv, positions, slot_mapping, query_starts, kv_lens, page_table, rope, q_weight,
            k_weight, k_pool, v_pool, sinks, gate, rope_positions, reaches, window_starts, *out,
            *k_out, *v_out},
           {layer, heads, window, scale, soft_cap, norm_eps, norms_values});
  });
}

namespace {

struct LatentBuffers {
  Any absorbed, queries, keys, positions, slot_mapping, query_starts, kv_lens, page_table, rope,
      norm, pool, rope_positions, out, pool_out;
};

AttendTask latent_task(const LatentBuffers& b, int64_t layer, int64_t heads) {
  AttendTask task{};
  task.rows = dim(b.kv_lens, 0);
  task.pages_per_row = dim(b.page_table, 1);
  task.num_pages = dim(b.pool, 0);
  task.num_layers = dim(b.pool, 1);
  task.layer = layer;
  task.kv_heads = 1;
  task.page_size = dim(b.pool, 3);
  task.head_size = dim(b.pool, 4);
  task.heads = heads;
  task.rope_rows = dim(b.rope, 0);
  task.rotary_size = dim(b.rope, 1);
  task.value_size = task.head_size - task.rotary_size;
  task.latent.query_size = heads > 0 ? dim(b.queries, 1) / heads : 0;
  task.num_tokens = int32(b.query_starts)[task.rows];
  return task;
}

void check_latents(const LatentBuffers& b, const AttendTask& task, DType dtype) {
  require(b.pool.element_type() == pool_type(task, dtype) && dim(b.pool, 2) == 1,
          "the pool must be u16 beside bf16, or f32 beside f32, with one KV head");
  require(b.pool_out.untyped_data() == b.pool.untyped_data(),
          "the pool must be donated and aliased to the result");
  require(task.layer >= 0 && task.layer < task.num_layers, "layer is outside the pool's layers");
  require(task.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(task.head_size <= 1024 && task.value_size > 0 && task.value_size % kLanes == 0 &&
              task.rotary_size > 0 && task.rotary_size % kLanes == 0,
          "the latent and the rotary size must be multiples of 16, at most 1024 together");
  require(task.heads > 0 && dim(b.absorbed, 1) == task.heads * task.value_size,
          "absorbed must be [T, Hq L]");
  require(element_type(b.queries) == dtype && dim(b.queries, 1) % task.heads == 0 &&
              task.latent.query_size >= task.rotary_size,
          "queries must be [T, Hq Dq] of absorbed's type, Dq at least the rotary size");
  require(b.keys.element_type() == ffi::F32 && dim(b.keys, 1) == task.head_size,
          "keys must be f32 [T, L + rotary size]");
  require(dim(b.norm, 0) == task.value_size, "norm must be f32 [L]");
  require(dim(b.query_starts, 0) == task.rows + 1, "query_starts must be [R + 1]");
  require(dim(b.rope_positions, 0) >= task.num_tokens, "rope_positions must be [T]");
  require(dim(b.page_table, 0) == task.rows, "page_table must be [R, P]");
  require(task.num_tokens >= 0 && task.num_tokens <= dim(b.absorbed, 0) &&
              task.num_tokens <= dim(b.queries, 0) && task.num_tokens <= dim(b.keys, 0),
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
// rope_positions [T], rows of rope. Results act [T, Hq L], and the pool, which must be donated and alias operand 10. Attributes: layer i64;
// heads i64; scale f32; norm_eps f32; pairs_neighbours bool.
//
// Attention of absorbed queries over normed latents (multi-head latent attention), which are keys
// and values of all heads; rows, positions and slots as for rope_append_attend. With
// pairs_neighbours elements 2 i and 2 i + 1 are rotated together, else those of two halves.
ffi::Error latent_attend_call(Any absorbed, Any queries, Any keys, Any positions, Any slot_mapping,
                              Any query_starts, Any kv_lens, Any page_table, Any rope, Any norm,
                              Any pool, Any rope_positions, AnyResult out, AnyResult pool_out,
                              int64_t layer, int64_t heads, float scale, float norm_eps, bool pairs_neighbours) {
  return guarded("cadenza_latent_attend", [&] {
    ProfileScope profile(Op::kRopeAppendAttend);
    const LatentBuffers b{absorbed, queries, keys, positions, slot_mapping, query_starts, kv_lens,
                          page_table, rope, norm, pool, rope_positions, *out, *pool_out};
    const DType dtype = element_type(absorbed);
    AttendTask task = latent_task(b, layer, heads);
    check_latents(b, task, dtype);
    task.scale = scale;
    task.norm_eps = norm_eps;
    task.latent.absorbed = absorbed.untyped_data();
    task.latent.queries = queries.untyped_data();
    task.latent.keys = data<float>(keys);
    task.latent.pairs_neighbours = pairs_neighbours;
    task.positions = int32(positions);
    task.rope_positions = int32(rope_positions);
    task.slot_mapping = int32(slot_mapping);
    task.query_starts = int32(query_starts);
    task.kv_lens = int32(kv_lens);
    task.page_table = int32(page_table);
    task.rope = data<float>(rope);
    task.k_weight = optional_f32(norm);
    task.k_pool = pool_out->untyped_data();
    task.out = out->untyped_data();
    if (profile.is_on()) profile.reads(latent_bytes_read(task, dtype));
    rope_append_attend(runtime(), dtype, task);
  });
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
ffi::Error score_keys_call(Any qkv, Any positions, Any query_starts, Any score_lens, Any page_table,
                           Any rope, Any q_weight, Any k_pool, Any rope_positions, Any scores,
                           AnyResult out, int64_t layer, int64_t heads, float scale, float soft_cap,
                           float norm_eps, bool is_first, bool is_last) {
  return guarded("cadenza_score_keys", [&] {
    ProfileScope profile(Op::kScoreKeys);
    const Any none = absent();
    const AttendBuffers b{qkv,  positions, none, query_starts, score_lens,     page_table, rope, q_weight, none,
                          k_pool, k_pool,    none, none,         rope_positions, none,       none, none,     none,
                          none};
    const DType dtype = element_type(qkv);
    ScoreTask task{};
    task.attend = shapes(b, {layer, heads, 0, scale, soft_cap, norm_eps, false});
    AttendTask& attend = task.attend;
    require(k_pool.element_type() == pool_type(attend, dtype), "k_pool must be u8, u16 beside bf16, or f32");
    require(attend.head_size % kLanes == 0 && attend.head_size <= 512 && attend.heads % attend.kv_heads == 0 &&
                dim(qkv, 1) == attend.qkv_width() && attend.layer < attend.num_layers,
            "qkv, k_pool, heads and layer must be those of rope_append_attend");
    attend.qkv = qkv.untyped_data();
    attend.positions = int32(positions);
    attend.rope_positions = int32(rope_positions);
    attend.query_starts = int32(query_starts);
    attend.page_table = int32(page_table);
    attend.rope = data<float>(rope);
    attend.q_weight = optional_f32(q_weight);
    attend.norm_spans_heads = attend.q_weight != nullptr && dim(q_weight, 0) != attend.head_size;
    attend.k_pool = k_pool.untyped_data();
    attend.num_tokens = attend.query_starts[attend.rows];
    task.score_lens = int32(score_lens);
    task.is_first = is_first;
    task.is_last = is_last;
    task.stride = dim(scores, 2);
    task.best = static_cast<float*>(out->untyped_data());
    task.sums = task.best + attend.rows * task.stride;
    check_scores(scores, *out, task);
    if (profile.is_on()) profile.reads(key_bytes_read(task, dtype));
    score_keys(runtime(), dtype, task);
  });
}

}  // namespace cadenza::xla_ffi
