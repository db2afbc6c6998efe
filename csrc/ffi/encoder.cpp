// Operations of image towers as XLA calls them. Conventions: csrc/README.md.
#include "ffi/targets.h"

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
ffi::Error layer_norm_call(Any x, Any weight, Any bias, Any count, AnyResult out, float eps) {
  return guarded("cadenza_layer_norm", [&] {
    ProfileScope profile(Op::kLayerNorm);
    LayerNormTask task{};
    task.rows = true_count(count, dim(*out, 0));
    task.width = dim(*out, 1);
    require(is_f32(x) && dim(x, 1) == task.width && dim(x, 0) >= task.rows, "x must be f32 [B, E]");
    require(dim(weight, 0) == task.width, "the norm's weight must be f32 [E]");
    task.x = data<float>(x);
    task.weight = optional_f32(weight);
    task.bias = optional_f32(bias);
    require(task.bias == nullptr || dim(bias, 0) == task.width, "the bias must be f32 [E] or empty");
    task.eps = eps;
    task.out = out->untyped_data();
    if (profile.is_on()) profile.reads((task.rows + 2) * task.width * int64_t(sizeof(float)));
    layer_norm(runtime(), element_type(*out), task);
  });
}

// cadenza_activate: x act [B, F]; count. Result act [B, F]. Attribute: kind i64, 0 silu, 1 gelu_tanh,
// 2 gelu, 3 quick_gelu.
ffi::Error activate_call(Any x, Any count, AnyResult out, int64_t kind) {
  return guarded("cadenza_activate", [&] {
    ProfileScope profile(Op::kActivate);
    const DType dtype = element_type(x);
    require(element_type(*out) == dtype, "the result must have x's type");
    require(kind >= 0 && kind < kNumEncoderActivations, "the activation is none of its kinds");
    ActivateTask task{true_count(count, dim(*out, 0)), dim(*out, 1), x.untyped_data(),
                      static_cast<EncoderActivation>(kind), out->untyped_data()};
    require(dim(x, 1) == task.width && dim(x, 0) >= task.rows, "x must be [B, F]");
    if (profile.is_on()) profile.reads(task.rows * task.width * bytes_of(dtype));
    activate(runtime(), dtype, task);
  });
}

// cadenza_keep_heads: qkv act [B, 3 H D]; turns f32 [B, R] or [0]; q_weight and k_weight f32 [D] or
// [0]; start; count; queries, keys and values as encoder_heads has them, which the results alias.
// Attributes: norm_eps f32; norms_values bool.
ffi::Error keep_heads_call(Any qkv, Any turns, Any q_weight, Any k_weight, Any start, Any count,
                           Any queries, Any keys, Any values, AnyResult queries_out,
                           AnyResult keys_out, AnyResult values_out, float norm_eps,
                           bool norms_values) {
  return guarded("cadenza_keep_heads", [&] {
    ProfileScope profile(Op::kKeepHeads);
    const DType dtype = element_type(qkv);
    require(queries_out->untyped_data() == queries.untyped_data() &&
                keys_out->untyped_data() == keys.untyped_data() &&
                values_out->untyped_data() == values.untyped_data(),
            "queries, keys and values must be updated in place");
    KeepHeadsTask task{};
    task.kept = encoder_heads(queries, keys, values, dtype);
    task.rows = true_count(count, dim(qkv, 0));
    task.start = number(start, task.kept.rows - task.rows, "the block is outside the rows");
    task.qkv = qkv.untyped_data();
    require(dim(qkv, 1) == 3 * task.kept.width(), "qkv must be [B, 3 H D]");
    task.turns = optional_f32(turns);
    if (task.turns != nullptr) {
      task.rotary_size = dim(turns, 1);
      require(dim(turns, 0) >= task.rows && task.rotary_size % 2 == 0 &&
                  task.rotary_size <= task.kept.head_size,
              "turns must be f32 [B, R], with an even R of at most D");
    }
    task.q_weight = optional_f32(q_weight);
    task.k_weight = optional_f32(k_weight);
    const int64_t size = task.kept.head_size;
    require((task.q_weight == nullptr || dim(q_weight, 0) == size) &&
                (task.k_weight == nullptr || dim(k_weight, 0) == size),
            "the norms' weights must be f32 [D] or empty");
    task.norm_eps = norm_eps;
    task.norms_values = norms_values;
    if (profile.is_on()) profile.reads(task.rows * 3 * task.kept.width() * bytes_of(dtype));
    keep_heads(runtime(), dtype, task);
  });
}

// cadenza_encode_attend: queries, keys and values as encoder_heads has them; start; count;
// num_rows, those of the image; bounds [B, 2] or [0]. Result act [B, H D]: queries start to start +
// count - 1 over the image's rows, or those within their bounds. Attribute: scale f32.
ffi::Error encode_attend_call(Any queries, Any keys, Any values, Any start, Any count,
                              Any num_rows, Any bounds, AnyResult out, float scale) {
  return guarded("cadenza_encode_attend", [&] {
    ProfileScope profile(Op::kEncodeAttend);
    const DType dtype = element_type(*out);
    EncodeTask task{};
    task.kept = encoder_heads(queries, keys, values, dtype);
    task.rows = true_count(count, dim(*out, 0));
    task.start = number(start, task.kept.rows - task.rows, "the block is outside the rows");
    task.image_rows = number(num_rows, task.kept.rows, "the image has more rows than its memory");
    if (bounds.element_count() != 0) {
      require(dim(bounds, 0) >= task.rows && dim(bounds, 1) == 2, "bounds must be int32 [B, 2]");
      task.bounds = int32(bounds);
    }
    require(scale > 0.0f, "the scale must be above 0");
    require(dim(*out, 1) == task.kept.width(), "the result must be [B, H D]");
    task.scale = scale;
    task.out = out->untyped_data();
    if (profile.is_on()) {
      profile.reads((2 * task.image_rows + task.rows) * task.kept.width() * bytes_of(dtype));
    }
    encode_attend(runtime(), dtype, task);
  });
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
ffi::Error keep_rows_call(Any x, Any images, Any slots, Any count, AnyResult out, int64_t part) {
  return guarded("cadenza_keep_rows", [&] {
    ProfileScope profile(Op::kKeepRows);
    const DType dtype = element_type(x);
    require(element_type(images) == dtype, "x must have the type of the images' rows");
    require(out->untyped_data() == images.untyped_data(), "images must be updated in place");
    const KeepRowsTask task{image_rows(x, images, slots, count, part), bytes_of(dtype),
                            x.untyped_data(), out->untyped_data()};
    if (profile.is_on()) profile.reads(task.rows.rows * task.rows.width * task.element_bytes);
    keep_rows(task);
  });
}

// cadenza_place_rows: x f32 [T, E]; images act [S, parts E]; slots [T]; count. The result aliases x: rows
// with a slot are replaced by the part of that row of images, or it is added to them. Attributes:
// part i64; adds bool.
ffi::Error place_rows_call(Any x, Any images, Any slots, Any count, AnyResult out, int64_t part,
                           bool adds) {
  return guarded("cadenza_place_rows", [&] {
    ProfileScope profile(Op::kPlaceRows);
    require(is_f32(x) && is_f32(*out), "x must be f32 [T, E]");
    require(out->untyped_data() == x.untyped_data(), "x must be updated in place");
    const PlaceRowsTask task{image_rows(x, images, slots, count, part), images.untyped_data(),
                             static_cast<float*>(out->untyped_data()), adds};
    if (profile.is_on()) profile.reads(task.rows.rows * task.rows.width * bytes_of(element_type(images)));
    place_rows(runtime(), element_type(images), task);
  });
}

}  // namespace cadenza::xla_ffi
