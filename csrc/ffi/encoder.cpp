// Operations of image towers as XLA calls them. Conventions: csrc/README.md.
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

bool is_f32(const Any& buffer) { return buffer.element_type() == ffi::F32; }

// One int32 from 0 to `most`.
int64_t number(const Any& buffer, int64_t most, const char* message) {
  require(buffer.element_count() >= 1, message);
  const int64_t n = int32(buffer)[0];
  require(n >= 0 && n <= most, message);
  return n;
}

// Queries [H, N, D], keys [H, N, D] and values [H, N, columns] of activations; bf16 is u16, as in
// pools.
EncoderHeads encoder_heads(const Any& queries, const Any& keys, const Any& values, DType dtype) {
  const ffi::DataType type = dtype == DType::kBf16 ? ffi::U16 : ffi::F32;
  require(queries.element_type() == type && keys.element_type() == type &&
              values.element_type() == type,
          "queries, keys and values must have the type of the activations, bf16 as u16");
  EncoderHeads heads{dim(queries, 0),        dim(queries, 2),     dim(queries, 1),
                     queries.untyped_data(), keys.untyped_data(), values.untyped_data()};
  require(heads.rows % kLanes == 0, "the rows must be a multiple of 16");
  require(heads.head_size % 2 == 0 && heads.head_size >= 2 && heads.head_size <= 512,
          "the head size must be even, and at most 512");
  const int64_t plain = heads.heads * heads.rows * heads.head_size;
  require(int64_t(keys.element_count()) == plain &&
              int64_t(values.element_count()) == heads.heads * heads.rows * heads.value_columns(),
          "keys must be [H, N, D], and values [H, N, D rounded up to 16]");
  return heads;
}

}  // namespace

// cadenza_layer_norm: x f32 [B, E]; weight f32 [E]; bias f32 [E] or [0]; count. Result act [B, E].
// Attribute: eps f32.
void execute(const calls::layer_norm& c) {
  ProfileScope profile(c.kOp);
  LayerNormTask task{};
  task.rows = true_count(c.count, dim(c.out, 0));
  task.width = dim(c.out, 1);
  require(is_f32(c.x) && dim(c.x, 1) == task.width && dim(c.x, 0) >= task.rows, "x must be f32 [B, E]");
  require(dim(c.weight, 0) == task.width, "the norm's weight must be f32 [E]");
  task.x = data<float>(c.x);
  task.weight = optional_f32(c.weight);
  task.bias = optional_f32(c.bias);
  require(task.bias == nullptr || dim(c.bias, 0) == task.width, "the bias must be f32 [E] or empty");
  task.eps = c.eps;
  task.out = c.out.untyped_data();
  if (profile.is_on()) profile.reads((task.rows + 2) * task.width * int64_t(sizeof(float)));
  layer_norm(runtime(), element_type(c.out), task);
}

// cadenza_activate: x act [B, F]; count. Result act [B, F]. Attribute: kind i64, 0 silu, 1 gelu_tanh,
// 2 gelu, 3 quick_gelu.
void execute(const calls::activate& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.x);
  require(element_type(c.out) == dtype, "the result must have x's type");
  require(c.kind >= 0 && c.kind < kNumEncoderActivations, "the activation is none of its kinds");
  ActivateTask task{true_count(c.count, dim(c.out, 0)), dim(c.out, 1), c.x.untyped_data(),
                    static_cast<EncoderActivation>(c.kind), c.out.untyped_data()};
  require(dim(c.x, 1) == task.width && dim(c.x, 0) >= task.rows, "x must be [B, F]");
  if (profile.is_on()) profile.reads(task.rows * task.width * bytes_of(dtype));
  activate(runtime(), dtype, task);
}

// cadenza_keep_heads: qkv act [B, 3 H D]; turns f32 [B, R] or [0]; q_weight and k_weight f32 [D] or
// [0]; start; count; queries, keys and values as encoder_heads has them, which the results alias.
// Attributes: norm_eps f32; norms_values bool.
void execute(const calls::keep_heads& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.qkv);
  require(c.queries_out.untyped_data() == c.queries.untyped_data() &&
              c.keys_out.untyped_data() == c.keys.untyped_data() &&
              c.values_out.untyped_data() == c.values.untyped_data(),
          "queries, keys and values must be updated in place");
  KeepHeadsTask task{};
  task.kept = encoder_heads(c.queries, c.keys, c.values, dtype);
  task.rows = true_count(c.count, dim(c.qkv, 0));
  task.start = number(c.start, task.kept.rows - task.rows, "the block is outside the rows");
  task.qkv = c.qkv.untyped_data();
  require(dim(c.qkv, 1) == 3 * task.kept.width(), "qkv must be [B, 3 H D]");
  task.turns = optional_f32(c.turns);
  if (task.turns != nullptr) {
    task.rotary_size = dim(c.turns, 1);
    require(dim(c.turns, 0) >= task.rows && task.rotary_size % 2 == 0 &&
                task.rotary_size <= task.kept.head_size,
            "turns must be f32 [B, R], with an even R of at most D");
  }
  task.q_weight = optional_f32(c.q_weight);
  task.k_weight = optional_f32(c.k_weight);
  const int64_t size = task.kept.head_size;
  require((task.q_weight == nullptr || dim(c.q_weight, 0) == size) &&
              (task.k_weight == nullptr || dim(c.k_weight, 0) == size),
          "the norms' weights must be f32 [D] or empty");
  task.norm_eps = c.norm_eps;
  task.norms_values = c.norms_values;
  if (profile.is_on()) profile.reads(task.rows * 3 * task.kept.width() * bytes_of(dtype));
  keep_heads(runtime(), dtype, task);
}

// cadenza_encode_attend: queries, keys and values as encoder_heads has them; start; count;
// num_rows, those of the image; bounds [B, 2] or [0]. Result act [B, H D]: queries start to start +
// count - 1 over the image's rows, or those within their bounds. Attribute: scale f32.
void execute(const calls::encode_attend& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.out);
  EncodeTask task{};
  task.kept = encoder_heads(c.queries, c.keys, c.values, dtype);
  task.rows = true_count(c.count, dim(c.out, 0));
  task.start = number(c.start, task.kept.rows - task.rows, "the block is outside the rows");
  task.image_rows = number(c.num_rows, task.kept.rows, "the image has more rows than its memory");
  if (c.bounds.element_count() != 0) {
    require(dim(c.bounds, 0) >= task.rows && dim(c.bounds, 1) == 2, "bounds must be int32 [B, 2]");
    task.bounds = int32(c.bounds);
  }
  require(c.scale > 0.0f, "the scale must be above 0");
  require(dim(c.out, 1) == task.kept.width(), "the result must be [B, H D]");
  task.scale = c.scale;
  task.out = c.out.untyped_data();
  if (profile.is_on()) {
    profile.reads((2 * task.image_rows + task.rows) * task.kept.width() * bytes_of(dtype));
  }
  encode_attend(runtime(), dtype, task);
}

namespace {

ImageRowsTask image_rows(const Any& x, const Any& images, const Any& slots, const Any& count,
                         int64_t part) {
  ImageRowsTask task{};
  task.rows = true_count(count, dim(x, 0));
  task.width = dim(x, 1);
  task.slots_count = dim(images, 0);
  require(task.width > 0 && dim(images, 1) % task.width == 0,
          "the rows of images must be parts as wide as x");
  task.parts = dim(images, 1) / task.width;
  task.part = part;
  require(part >= 0 && part < task.parts, "the rows of images have no such part");
  require(dim(slots, 0) >= task.rows, "there are too few slots");
  task.slots = int32(slots);
  return task;
}

}  // namespace

// cadenza_keep_rows: x act [B, E]; images act [S, parts E]; slots [B]; count. The result aliases images:
// the part of the rows at the slots is x; negative slots are skipped. Attribute: part i64.
void execute(const calls::keep_rows& c) {
  ProfileScope profile(c.kOp);
  const DType dtype = element_type(c.x);
  require(element_type(c.images) == dtype, "x must have the type of the images' rows");
  require(c.out.untyped_data() == c.images.untyped_data(), "images must be updated in place");
  const KeepRowsTask task{image_rows(c.x, c.images, c.slots, c.count, c.part), bytes_of(dtype),
                          c.x.untyped_data(), c.out.untyped_data()};
  if (profile.is_on()) profile.reads(task.rows.rows * task.rows.width * task.element_bytes);
  keep_rows(task);
}

// cadenza_place_rows: x f32 [T, E]; images act [S, parts E]; slots [T]; count. The result aliases x: rows
// with a slot are replaced by the part of that row of images, or it is added to them. Attributes:
// part i64; adds bool.
void execute(const calls::place_rows& c) {
  ProfileScope profile(c.kOp);
  require(is_f32(c.x) && is_f32(c.out), "x must be f32 [T, E]");
  require(c.out.untyped_data() == c.x.untyped_data(), "x must be updated in place");
  const PlaceRowsTask task{image_rows(c.x, c.images, c.slots, c.count, c.part), c.images.untyped_data(),
                           static_cast<float*>(c.out.untyped_data()), c.adds};
  if (profile.is_on()) profile.reads(task.rows.rows * task.rows.width * bytes_of(element_type(c.images)));
  place_rows(runtime(), element_type(c.images), task);
}

}  // namespace cadenza::xla_ffi
