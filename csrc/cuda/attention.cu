// The operations that attend: their checks, their workspace, and the launch of their kernels.
#include <algorithm>

#include "cuda/attention_append.h"
#include "cuda/bodies.h"

namespace cadenza::xla_ffi {

namespace {

using cuda::Attention;

// What both operations have of rows, slots and pools.
struct RowBuffers {
  Any positions, slot_mapping, query_starts, kv_lens, page_table, rope, rope_positions, pool, pool_out;
};

// The largest numbers of a step that the host knows.
struct Bounds {
  int64_t tokens, rows, parts;
};

Fault fault_of_step() {
#ifdef CADENZA_FAULTS
  return injected_fault;
#else
  return Fault::kNone;
#endif
}

void read_rows(const RowBuffers& b, Attention& a) {
  a.rows = int(dim(b.kv_lens, 0));
  a.pages_per_row = int(dim(b.page_table, 1));
  a.num_layers = int(dim(b.pool, 1));
  a.kv_heads = int(dim(b.pool, 2));
  a.page_size = int(dim(b.pool, 3));
  a.positions = int32(b.positions);
  a.rope_positions = int32(b.rope_positions);
  a.query_starts = int32(b.query_starts);
  a.kv_lens = int32(b.kv_lens);
  a.page_table = int32(b.page_table);
  a.k_pool = static_cast<const char*>(b.pool_out.untyped_data());
  a.fault = fault_of_step();
  require(a.layer >= 0 && a.layer < a.num_layers, "layer is outside the pools' layers");
  require(a.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(dim(b.query_starts, 0) == a.rows + 1, "query_starts must be [R + 1]");
  require(dim(b.page_table, 0) == a.rows, "page_table must be [R, P]");
  require(dim(b.rope_positions, 0) == dim(b.positions, 0), "rope_positions must be [T]");
  require(b.pool_out.untyped_data() == b.pool.untyped_data(),
          "the pools must be donated and aliased to the results");
  require(b.pool_out.dimensions() == b.pool.dimensions(), "the pools' results must have their shape");
}

Bounds bounds_of(const Attention& a, int64_t padded_tokens) {
  const int64_t tokens = cuda::rows_to_compute(padded_tokens);
  int64_t parts = ceil_div(int64_t(a.pages_per_row) * a.page_size, cuda::kPart) + (kHasFaults ? 1 : 0);
  if (a.window > 0) parts = std::min<int64_t>(parts, (a.window + cuda::kFewQueries) / cuda::kPart + 2);
  return {tokens, std::min<int64_t>(a.rows, tokens), parts};
}

// Takes what the kernels need for themselves, and bounds the work.
struct Work {
  int64_t tokens;
  cuda::Pieces pieces;

  Work(Attention& a, const Bounds& bounds, cuda::Workspace& workspace) : tokens(bounds.tokens) {
    const int64_t queries = std::min(tokens, bounds.rows * cuda::kFewQueries);
    const int64_t slots = queries * bounds.parts, slot_bytes = int64_t(a.heads) * a.partial_stride() * 4;
    a.num_slots = int(std::min(slots, cuda::kMostPartialBytes / slot_bytes));
    const int64_t row_queries = std::min<int64_t>(tokens, cuda::kFewQueries) * a.group();
    a.few_tiles = int(ceil_div(row_queries, cuda::kTileRows));
    a.plan.contexts = workspace.take<cuda::RowContext>(a.rows);
    for (int32_t** each : {&a.plan.few, &a.plan.many}) *each = workspace.take<int32_t>(a.rows + 1);
    a.plan.taken = workspace.take<int32_t>(2);
    a.plan.parts = workspace.take<int32_t>(int64_t(a.rows) * a.few_tiles * a.kv_heads);
    a.partials = workspace.take<float>(a.num_slots * slot_bytes / 4);
    const bool all_are_few = tokens <= cuda::kFewQueries && slots <= a.num_slots;
    const int64_t tiles = all_are_few ? 0 : ceil_div(tokens * a.group(), a.many_rows) + bounds.rows;
    pieces = {bounds.rows * a.few_tiles * bounds.parts * a.kv_heads, tiles * a.kv_heads};
  }
};

// Scores are scaled for exp2.
void set_scale(Attention& a, float scale, float soft_cap) {
  a.scale = soft_cap == 0.0f ? scale * cuda::kLog2e : scale / soft_cap;
  a.soft_cap = soft_cap * cuda::kLog2e;
}

ffi::DataType pool_type(DType dtype) { return dtype == DType::kBf16 ? ffi::U16 : ffi::F32; }

struct HeadBuffers {
  Any qkv, q_weight, k_weight, k_pool, v_pool, sinks, gate, reaches, window_starts, out, v_out;
};

void check_heads(const HeadBuffers& b, const Attention& a, const cuda::HeadAppend& given) {
  const DType dtype = element_type(b.qkv);
  const ffi::DataType expected = given.has_codes ? ffi::U8 : pool_type(dtype);
  require(b.k_pool.element_type() == expected && b.v_pool.element_type() == expected,
          "k_pool and v_pool must be u8, u16 beside bf16, or f32 beside f32");
  require(b.k_pool.dimensions() == b.v_pool.dimensions(), "k_pool and v_pool must have the same shape");
  require(b.v_out.untyped_data() == b.v_pool.untyped_data(),
          "the pools must be donated and aliased to the results");
  require(a.key_size > 0 && a.key_size % kLanes == 0 && a.key_size <= 512,
          "the head size must be a multiple of 16, at most 512");
  require(a.heads > 0 && a.heads % a.kv_heads == 0,
          "the number of heads must be a multiple of the number of KV heads");
  require(given.kv_parts >= 0 && given.kv_parts <= 2 &&
              dim(b.qkv, 1) == int64_t(a.heads + given.kv_parts * a.kv_heads) * a.key_size,
          "qkv must be [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]");
  require(given.kv_parts != 1 || given.norms_values, "values that are made of keys must be normed");
  require(given.rotary_size <= a.key_size,
          "rope must be [positions, rotary size], the rotary size even and at most D; or one column "
          "more, the factors of the queries");
  const int64_t q_width = given.norm_spans_heads ? a.heads * a.key_size : a.key_size;
  const int64_t k_width = given.norm_spans_heads ? a.kv_heads * a.key_size : a.key_size;
  require((b.q_weight.element_count() == 0 || dim(b.q_weight, 0) == q_width) &&
              (b.k_weight.element_count() == 0 || dim(b.k_weight, 0) == k_width),
          "q_weight and k_weight must be f32 [D], or [Hq D] and [Hkv D]");
  require(b.sinks.element_count() == 0 || dim(b.sinks, 0) == a.heads, "sinks must be f32 [Hq] or empty");
  require(b.gate.element_count() == 0 ||
              (element_type(b.gate) == dtype && dim(b.gate, 0) >= dim(b.out, 0) &&
               dim(b.gate, 1) == a.heads * a.key_size),
          "gate must have qkv's type, [T, Hq D], or be empty");
  require(b.reaches.element_count() == 0 || dim(b.reaches, 0) >= dim(b.out, 0), "reaches must be [T] or empty");
  require(b.window_starts.element_count() == 0 || dim(b.window_starts, 0) >= dim(b.out, 0),
          "window_starts must be [T] or empty");
  require(element_type(b.out) == dtype && dim(b.out, 1) == a.heads * a.key_size,
          "the result must have qkv's type, [T, Hq D]");
}

struct HeadAttrs {
  int64_t heads;
  float norm_eps;
  bool norms_values;
};

cuda::HeadAppend append_of(const RowBuffers& rows, const HeadBuffers& b, const Attention& a,
                           const HeadAttrs& attrs) {
  cuda::HeadAppend given{};
  given.qkv = b.qkv.untyped_data();
  given.slot_mapping = int32(rows.slot_mapping);
  given.rope = data<float>(rows.rope);
  given.rope_rows = int(dim(rows.rope, 0));
  given.rope_columns = int(dim(rows.rope, 1));
  given.rotary_size = given.rope_columns / 2 * 2;
  given.q_weight = optional_f32(b.q_weight);
  given.k_weight = optional_f32(b.k_weight);
  given.norm_eps = attrs.norm_eps;
  given.norm_spans_heads = b.q_weight.element_count() > 0 && dim(b.q_weight, 0) != a.key_size;
  given.norms_values = attrs.norms_values;
  const int64_t kv_width = std::max<int64_t>(int64_t(a.kv_heads) * a.key_size, 1);
  given.kv_parts = int((dim(b.qkv, 1) - attrs.heads * a.key_size) / kv_width);
  given.num_slots = dim(b.k_pool, 0) * a.page_size;
  given.has_codes = b.k_pool.element_type() == ffi::U8;
  given.k_pool = const_cast<char*>(a.k_pool);
  given.v_pool = static_cast<char*>(b.v_out.untyped_data());
  return given;
}

void attend_heads(const RowBuffers& rows, const HeadBuffers& b, Attention a, const HeadAttrs& attrs) {
  a.heads = int(attrs.heads);
  read_rows(rows, a);
  a.key_size = int(dim(b.k_pool, 4));
  if (b.k_pool.element_type() == ffi::U8) a.key_size -= cuda::code_bytes(0);
  a.value_size = a.key_size;
  const bool has_codes = b.k_pool.element_type() == ffi::U8;
  a.many_rows = (has_codes ? cuda::code_row_groups(a.key_size) : cuda::row_groups(a.key_size)) * cuda::kTileRows;
  cuda::HeadAppend given = append_of(rows, b, a, attrs);
  check_heads(b, a, given);
  const bool is_f32 = element_type(b.qkv) == DType::kF32;
  a.v_pool = given.v_pool;
  a.sinks = optional_f32(b.sinks);
  a.gate = b.gate.element_count() == 0 ? nullptr : b.gate.untyped_data();
  a.reaches = optional_int32(b.reaches);
  a.window_starts = optional_int32(b.window_starts);
  a.out = b.out.untyped_data();
  a.out_is_f32 = is_f32;
  cuda::Workspace workspace;
  const Work work(a, bounds_of(a, dim(b.out, 0)), workspace);
  const int64_t heads = work.tokens * a.heads, bytes = given.has_codes || !is_f32 ? 2 : 4;
  given.tokens = int(work.tokens);
  given.queries = workspace.take<char>(heads * a.key_size * bytes);
  given.query_scales = workspace.take<float>(given.has_codes ? heads : 0);
  a.queries = given.queries;
  a.query_scales = given.query_scales;
  append_heads(a, given, is_f32);
  const auto attend = given.has_codes ? cuda::attend_int8 : (is_f32 ? cuda::attend_f32 : cuda::attend_bf16);
  attend(a, work.pieces);
}

struct LatentBuffers {
  Any absorbed, queries, keys, norm, out;
};

void check_latents(const RowBuffers& rows, const LatentBuffers& b, const Attention& a,
                   const cuda::LatentAppend& given) {
  const DType dtype = element_type(b.absorbed);
  require(rows.pool.element_type() == pool_type(dtype) && a.kv_heads == 1,
          "the pool must be u16 beside bf16, or f32 beside f32, with one KV head");
  require(a.key_size <= 1024 && a.value_size > 0 && a.value_size % kLanes == 0 && given.rotary_size > 0 &&
              given.rotary_size % kLanes == 0,
          "the latent and the rotary size must be multiples of 16, at most 1024 together");
  require(a.heads > 0 && dim(b.absorbed, 1) == int64_t(a.heads) * a.value_size, "absorbed must be [T, Hq L]");
  require(element_type(b.queries) == dtype && dim(b.queries, 1) % a.heads == 0 &&
              given.query_size >= given.rotary_size,
          "queries must be [T, Hq Dq] of absorbed's type, Dq at least the rotary size");
  require(b.keys.element_type() == ffi::F32 && dim(b.keys, 1) == a.key_size,
          "keys must be f32 [T, L + rotary size]");
  require(dim(b.norm, 0) == a.value_size, "norm must be f32 [L]");
  require(element_type(b.out) == dtype && dim(b.out, 1) == dim(b.absorbed, 1),
          "the result must have absorbed's type, [T, Hq L]");
}

void attend_latents(const RowBuffers& rows, const LatentBuffers& b, Attention a, cuda::LatentAppend given) {
  read_rows(rows, a);
  a.key_size = int(dim(rows.pool, 4));
  given.rotary_size = int(dim(rows.rope, 1));
  a.value_size = a.key_size - given.rotary_size;
  a.many_rows = cuda::kLatentGroups * cuda::kTileRows;
  given.query_size = a.heads > 0 ? int(dim(b.queries, 1) / a.heads) : 0;
  check_latents(rows, b, a, given);
  const bool is_f32 = element_type(b.absorbed) == DType::kF32;
  a.out = b.out.untyped_data();
  a.out_is_f32 = is_f32;
  given.absorbed = b.absorbed.untyped_data();
  given.queries = b.queries.untyped_data();
  given.keys = data<float>(b.keys);
  given.slot_mapping = int32(rows.slot_mapping);
  given.rope = data<float>(rows.rope);
  given.rope_rows = int(dim(rows.rope, 0));
  given.norm = optional_f32(b.norm);
  given.num_slots = dim(rows.pool, 0) * a.page_size;
  given.pool = const_cast<char*>(a.k_pool);
  cuda::Workspace workspace;
  const Work work(a, bounds_of(a, dim(b.out, 0)), workspace);
  given.tokens = int(work.tokens);
  given.prepared = workspace.take<char>(work.tokens * a.heads * a.key_size * bytes_of(element_type(b.absorbed)));
  a.queries = given.prepared;
  append_latents(a, given, is_f32);
  (is_f32 ? cuda::attend_latents_f32 : cuda::attend_latents_bf16)(a, work.pieces);
}

}  // namespace

ffi::Error rope_append_attend_call(Any qkv, Any positions, Any slot_mapping, Any query_starts,
                                   Any kv_lens, Any page_table, Any rope, Any q_weight,
                                   Any k_weight, Any k_pool, Any v_pool, Any sinks, Any gate,
                                   Any rope_positions, Any reaches, Any window_starts, AnyResult out,
                                   AnyResult k_out, AnyResult v_out, int64_t layer, int64_t heads,
                                   float scale, int64_t window, float soft_cap, float norm_eps,
                                   bool norms_values) {
  return guarded("cadenza_rope_append_attend", [&] {
    Attention a{};
    a.layer = int(layer);
    a.window = int(window);
    set_scale(a, scale, soft_cap);
    attend_heads({positions, slot_mapping, query_starts, kv_lens, page_table, rope, rope_positions, k_pool, *k_out},
                 {qkv, q_weight, k_weight, k_pool, v_pool, sinks, gate, reaches, window_starts, *out, *v_out}, a,
                 {heads, norm_eps, norms_values});
  });
}

ffi::Error latent_attend_call(Any absorbed, Any queries, Any keys, Any positions, Any slot_mapping,
                              Any query_starts, Any kv_lens, Any page_table, Any rope, Any norm,
                              Any pool, Any rope_positions, AnyResult out, AnyResult pool_out,
                              int64_t layer, int64_t heads, float scale, float norm_eps, bool pairs_neighbours) {
  return guarded("cadenza_latent_attend", [&] {
    Attention a{};
    a.layer = int(layer);
    a.heads = int(heads);
    set_scale(a, scale, 0.0f);
    cuda::LatentAppend given{};
    given.norm_eps = norm_eps;
    given.pairs_neighbours = pairs_neighbours;
    attend_latents({positions, slot_mapping, query_starts, kv_lens, page_table, rope, rope_positions, pool, *pool_out},
                   {absorbed, queries, keys, norm, *out}, a, given);
  });
}

// No kernel of a GPU scores prompts; a runner that is to do so is refused before it is loaded.
ffi::Error score_keys_call(Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, AnyResult, int64_t, int64_t, float,
                           float, float, bool, bool) {
  return guarded("cadenza_score_keys", [] { require(false, "prompts are scored on CPUs"); });
}

}  // namespace cadenza::xla_ffi
