// The operations that attend: their checks, their workspace, and the launch of their kernels.
#include <algorithm>

#include "cuda/attention_append.h"
#include "cuda/bodies.h"

namespace cadenza::xla_ffi {

namespace {

using cuda::Attention;

// What both operations have of rows, slots and pools.
struct RowBuffers {
  Any positions, query_starts, kv_lens, page_table, rope_positions, pool, pool_out;
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

void read_rows(const RowBuffers& c, Attention& a) {
  a.rows = int(dim(c.kv_lens, 0));
  a.pages_per_row = int(dim(c.page_table, 1));
  a.num_layers = int(dim(c.pool, 1));
  a.kv_heads = int(dim(c.pool, 2));
  a.page_size = int(dim(c.pool, 3));
  a.positions = int32(c.positions);
  a.rope_positions = int32(c.rope_positions);
  a.query_starts = int32(c.query_starts);
  a.kv_lens = int32(c.kv_lens);
  a.page_table = int32(c.page_table);
  a.k_pool = static_cast<const char*>(c.pool_out.untyped_data());
  a.fault = fault_of_step();
  require(a.layer >= 0 && a.layer < a.num_layers, "layer is outside the pools' layers");
  require(a.page_size % kLanes == 0, "the page size must be a multiple of 16");
  require(dim(c.query_starts, 0) == a.rows + 1, "query_starts must be [R + 1]");
  require(dim(c.page_table, 0) == a.rows, "page_table must be [R, P]");
  require(dim(c.rope_positions, 0) == dim(c.positions, 0), "rope_positions must be [T]");
  require(c.pool_out.untyped_data() == c.pool.untyped_data(),
          "the pools must be donated and aliased to the results");
  require(c.pool_out.dimensions() == c.pool.dimensions(), "the pools' results must have their shape");
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

void check_heads(const calls::rope_append_attend& c, const Attention& a, const cuda::HeadAppend& given) {
  const DType dtype = element_type(c.qkv);
  const ffi::DataType expected = given.has_codes ? ffi::U8 : pool_type(dtype);
  require(c.k_pool.element_type() == expected && c.v_pool.element_type() == expected,
          "k_pool and v_pool must be u8, u16 beside bf16, or f32 beside f32");
  require(c.k_pool.dimensions() == c.v_pool.dimensions(), "k_pool and v_pool must have the same shape");
  require(c.v_out.untyped_data() == c.v_pool.untyped_data(),
          "the pools must be donated and aliased to the results");
  require(a.key_size > 0 && a.key_size % kLanes == 0 && a.key_size <= 512,
          "the head size must be a multiple of 16, at most 512");
  require(a.heads > 0 && a.heads % a.kv_heads == 0,
          "the number of heads must be a multiple of the number of KV heads");
  require(given.kv_parts >= 0 && given.kv_parts <= 2 &&
              dim(c.qkv, 1) == int64_t(a.heads + given.kv_parts * a.kv_heads) * a.key_size,
          "qkv must be [T, (Hq + 2 Hkv) D], [T, (Hq + Hkv) D] or [T, Hq D]");
  require(given.kv_parts != 1 || given.norms_values, "values that are made of keys must be normed");
  require(given.rotary_size <= a.key_size,
          "rope must be [positions, rotary size], the rotary size even and at most D; or one column "
          "more, the factors of the queries");
  const int64_t q_width = given.norm_spans_heads ? a.heads * a.key_size : a.key_size;
  const int64_t k_width = given.norm_spans_heads ? a.kv_heads * a.key_size : a.key_size;
  require((c.q_weight.element_count() == 0 || dim(c.q_weight, 0) == q_width) &&
              (c.k_weight.element_count() == 0 || dim(c.k_weight, 0) == k_width),
          "q_weight and k_weight must be f32 [D], or [Hq D] and [Hkv D]");
  require(c.sinks.element_count() == 0 || dim(c.sinks, 0) == a.heads, "sinks must be f32 [Hq] or empty");
  require(c.gate.element_count() == 0 ||
              (element_type(c.gate) == dtype && dim(c.gate, 0) >= dim(c.out, 0) &&
               dim(c.gate, 1) == a.heads * a.key_size),
          "gate must have qkv's type, [T, Hq D], or be empty");
  require(c.reaches.element_count() == 0 || dim(c.reaches, 0) >= dim(c.out, 0), "reaches must be [T] or empty");
  require(c.window_starts.element_count() == 0 || dim(c.window_starts, 0) >= dim(c.out, 0),
          "window_starts must be [T] or empty");
  require(element_type(c.out) == dtype && dim(c.out, 1) == a.heads * a.key_size,
          "the result must have qkv's type, [T, Hq D]");
}

cuda::HeadAppend append_of(const calls::rope_append_attend& c, const Attention& a) {
  cuda::HeadAppend given{};
  given.qkv = c.qkv.untyped_data();
  given.slot_mapping = int32(c.slot_mapping);
  given.rope = data<float>(c.rope);
  given.rope_rows = int(dim(c.rope, 0));
  given.rope_columns = int(dim(c.rope, 1));
  given.rotary_size = given.rope_columns / 2 * 2;
  given.q_weight = optional_f32(c.q_weight);
  given.k_weight = optional_f32(c.k_weight);
  given.norm_eps = c.norm_eps;
  given.norm_spans_heads = c.q_weight.element_count() > 0 && dim(c.q_weight, 0) != a.key_size;
  given.norms_values = c.norms_values;
  const int64_t kv_width = std::max<int64_t>(int64_t(a.kv_heads) * a.key_size, 1);
  given.kv_parts = int((dim(c.qkv, 1) - c.heads * a.key_size) / kv_width);
  given.num_slots = dim(c.k_pool, 0) * a.page_size;
  given.has_codes = c.k_pool.element_type() == ffi::U8;
  given.k_pool = const_cast<char*>(a.k_pool);
  given.v_pool = static_cast<char*>(c.v_out.untyped_data());
  return given;
}

void check_latents(const calls::latent_attend& c, const Attention& a, const cuda::LatentAppend& given) {
  const DType dtype = element_type(c.absorbed);
  require(c.pool.element_type() == pool_type(dtype) && a.kv_heads == 1,
          "the pool must be u16 beside bf16, or f32 beside f32, with one KV head");
  require(a.key_size <= 1024 && a.value_size > 0 && a.value_size % kLanes == 0 && given.rotary_size > 0 &&
              given.rotary_size % kLanes == 0,
          "the latent and the rotary size must be multiples of 16, at most 1024 together");
  require(a.heads > 0 && dim(c.absorbed, 1) == int64_t(a.heads) * a.value_size, "absorbed must be [T, Hq L]");
  require(element_type(c.queries) == dtype && dim(c.queries, 1) % a.heads == 0 &&
              given.query_size >= given.rotary_size,
          "queries must be [T, Hq Dq] of absorbed's type, Dq at least the rotary size");
  require(c.keys.element_type() == ffi::F32 && dim(c.keys, 1) == a.key_size,
          "keys must be f32 [T, L + rotary size]");
  require(dim(c.norm, 0) == a.value_size, "norm must be f32 [L]");
  require(element_type(c.out) == dtype && dim(c.out, 1) == dim(c.absorbed, 1),
          "the result must have absorbed's type, [T, Hq L]");
}

}  // namespace

void execute(const calls::rope_append_attend& c) {
  Attention a{};
  a.layer = int(c.layer);
  a.heads = int(c.heads);
  a.window = int(c.window);
  set_scale(a, c.scale, c.soft_cap);
  read_rows({c.positions, c.query_starts, c.kv_lens, c.page_table, c.rope_positions, c.k_pool, c.k_out}, a);
  a.key_size = int(dim(c.k_pool, 4));
  if (c.k_pool.element_type() == ffi::U8) a.key_size -= cuda::code_bytes(0);
  a.value_size = a.key_size;
  const bool has_codes = c.k_pool.element_type() == ffi::U8;
  a.many_rows = (has_codes ? cuda::code_row_groups(a.key_size) : cuda::row_groups(a.key_size)) * cuda::kTileRows;
  cuda::HeadAppend given = append_of(c, a);
  check_heads(c, a, given);
  const bool is_f32 = element_type(c.qkv) == DType::kF32;
  a.v_pool = given.v_pool;
  a.sinks = optional_f32(c.sinks);
  a.gate = c.gate.element_count() == 0 ? nullptr : c.gate.untyped_data();
  a.reaches = optional_int32(c.reaches);
  a.window_starts = optional_int32(c.window_starts);
  a.out = c.out.untyped_data();
  a.out_is_f32 = is_f32;
  cuda::Workspace workspace;
  const Work work(a, bounds_of(a, dim(c.out, 0)), workspace);
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

void execute(const calls::latent_attend& c) {
  Attention a{};
  a.layer = int(c.layer);
  a.heads = int(c.heads);
  set_scale(a, c.scale, 0.0f);
  cuda::LatentAppend given{};
  given.norm_eps = c.norm_eps;
  given.pairs_neighbours = c.pairs_neighbours;
  read_rows({c.positions, c.query_starts, c.kv_lens, c.page_table, c.rope_positions, c.pool, c.pool_out}, a);
  a.key_size = int(dim(c.pool, 4));
  given.rotary_size = int(dim(c.rope, 1));
  a.value_size = a.key_size - given.rotary_size;
  a.many_rows = cuda::kLatentGroups * cuda::kTileRows;
  given.query_size = a.heads > 0 ? int(dim(c.queries, 1) / a.heads) : 0;
  check_latents(c, a, given);
  const bool is_f32 = element_type(c.absorbed) == DType::kF32;
  a.out = c.out.untyped_data();
  a.out_is_f32 = is_f32;
  given.absorbed = c.absorbed.untyped_data();
  given.queries = c.queries.untyped_data();
  given.keys = data<float>(c.keys);
  given.slot_mapping = int32(c.slot_mapping);
  given.rope = data<float>(c.rope);
  given.rope_rows = int(dim(c.rope, 0));
  given.norm = optional_f32(c.norm);
  given.num_slots = dim(c.pool, 0) * a.page_size;
  given.pool = const_cast<char*>(a.k_pool);
  cuda::Workspace workspace;
  const Work work(a, bounds_of(a, dim(c.out, 0)), workspace);
  given.tokens = int(work.tokens);
  given.prepared = workspace.take<char>(work.tokens * a.heads * a.key_size * bytes_of(element_type(c.absorbed)));
  a.queries = given.prepared;
  append_latents(a, given, is_f32);
  (is_f32 ? cuda::attend_latents_f32 : cuda::attend_latents_bf16)(a, work.pieces);
}

// No kernel of a GPU scores prompts; a runner that is to do so is refused before it is loaded.
void execute(const calls::score_keys&) { require(false, "prompts are scored on CPUs"); }

}  // namespace cadenza::xla_ffi
