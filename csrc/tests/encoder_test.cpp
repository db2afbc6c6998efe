// Operations of image towers: agreement with double precision, and rows that do not depend on their block.
#include "tests/encoder.h"
#include "tests/exactness.h"

namespace cadenza::tests {
namespace {

template <class T>
void check_layer_norm(const Context& context, int64_t width) {
  Random random(static_cast<uint64_t>(width));
  const int64_t rows = 21;
  std::vector<float> x = random_values<float>(random, rows * width, 3);
  std::vector<float> weight = random_values<float>(random, width);
  std::vector<float> bias = random_values<float>(random, width);
  std::vector<T> out(size_t(rows * width)), one(size_t(width), T{});
  LayerNormTask task{rows, width, x.data(), weight.data(), bias.data(), 1e-3f, out.data()};
  layer_norm(context.runtime(1), dtype_of<T>(), task);
  for (int64_t r = 0; r < rows; r++) {
    LayerNormTask alone = task;
    alone.rows = 1, alone.x = x.data() + r * width, alone.out = one.data();
    layer_norm(context.runtime(0), dtype_of<T>(), alone);
    CHECK(same_bits(one.data(), out.data() + r * width, width));
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < width; i++) mean += x[size_t(r * width + i)] / double(width);
    for (int64_t i = 0; i < width; i++) squares += std::pow(x[size_t(r * width + i)] - mean, 2);
    const double scale = 1 / std::sqrt(squares / double(width) + 1e-3);
    for (int64_t i = 0; i < width; i++) {
      const double y = (x[size_t(r * width + i)] - mean) * scale * weight[size_t(i)];
      CHECK_NEAR(widen(out[size_t(r * width + i)]), y + bias[size_t(i)],
                 (kEpsilon<T> + 2e-6) * (std::abs(y) + std::abs(bias[size_t(i)])) + 2e-6);
    }
  }
}

TEST(layer_norm_agrees_with_double_precision_at_every_width) {
  for (int64_t width : {1, 15, 16, 17, 64, 65, 100, 1152}) {
    check_layer_norm<bf16>(context, width);
    check_layer_norm<float>(context, width);
  }
}

double double_activation(EncoderActivation activation, double x) {
  switch (activation) {
    case EncoderActivation::kSilu:
      return x / (1 + std::exp(-x));
    case EncoderActivation::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    case EncoderActivation::kGelu:
      return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case EncoderActivation::kQuickGelu:
      return x / (1 + std::exp(-1.702 * x));
  }
  return 0;
}

template <class T>
void check_activation(const Context& context, EncoderActivation activation, int64_t width) {
  Random random(3);
  const int64_t rows = 33;
  std::vector<T> x = random_values<T>(random, rows * width, 3), out(x.size());
  activate(context.runtime(1), dtype_of<T>(), {rows, width, x.data(), activation, out.data()});
  for (size_t i = 0; i < x.size(); i++) {
    const double expected = double_activation(activation, widen(x[i]));
    CHECK_NEAR(widen(out[i]), expected, kEpsilon<T> * std::abs(expected) + 1e-6);
  }
  activate(context.runtime(2), dtype_of<T>(), {rows, width, x.data(), activation, x.data()});
  CHECK(same_bits(x.data(), out.data(), int64_t(x.size())));
}

TEST(activations_agree_with_double_precision_in_place_too) {
  for (int kind = 0; kind < kNumEncoderActivations; kind++) {
    for (int64_t width : {1, 40}) {
      check_activation<bf16>(context, EncoderActivation(kind), width);
      check_activation<float>(context, EncoderActivation(kind), width);
    }
  }
}

std::vector<double> normed(const std::vector<double>& head, const float* weight) {
  double squares = 0;
  for (double x : head) squares += x * x / double(head.size());
  std::vector<double> y;
  for (size_t i = 0; i < head.size(); i++) {
    y.push_back(head[i] / std::sqrt(squares + 1e-6) * (weight == nullptr ? 1 : weight[i]));
  }
  return y;
}

// A head of side 0 (query), 1 (key) or 2 (value), as it is kept.
template <class T>
std::vector<double> double_head(const EncodedImage<T>& image, int64_t row, int side, int64_t head) {
  std::vector<double> plain;
  const int64_t at = ((row * 3 + side) * image.heads + head) * image.size;
  for (int64_t i = 0; i < image.size; i++) plain.push_back(widen(image.qkv[size_t(at + i)]));
  if (side == 2) return normed(plain, nullptr);
  std::vector<double> y = normed(plain, side == 0 ? image.query_norm.data() : image.key_norm.data()), turned = y;
  const int64_t half = image.rotary / 2;
  for (int64_t i = 0; i < half; i++) {
    const double c = image.turns[size_t(row * image.rotary + i)];
    const double s = image.turns[size_t(row * image.rotary + half + i)];
    turned[size_t(i)] = y[size_t(i)] * c - y[size_t(half + i)] * s;
    turned[size_t(half + i)] = y[size_t(half + i)] * c + y[size_t(i)] * s;
  }
  return turned;
}

template <class T>
void check_kept(const Context& context, int64_t size) {
  const EncodedImage<T> image(2, size, 37);
  EncoderMemory<T> memory(image, 48);
  memory.keep(context.runtime(2), 0, 5);
  memory.keep(context.runtime(1), 5, 32);
  for (int64_t row = 0; row < image.rows; row++) {
    for (int64_t head = 0; head < image.heads; head++) {
      const std::vector<double> q = double_head(image, row, 0, head), k = double_head(image, row, 1, head),
                                v = double_head(image, row, 2, head);
      for (int64_t i = 0; i < size; i++) {
        CHECK_NEAR(memory.query(head, row, i), q[size_t(i)], kEpsilon<T> * std::abs(q[size_t(i)]) + 4e-6);
        CHECK_NEAR(memory.key(head, row, i), k[size_t(i)], kEpsilon<T> * std::abs(k[size_t(i)]) + 4e-6);
        CHECK_NEAR(memory.value(head, row, i), v[size_t(i)], kEpsilon<T> * std::abs(v[size_t(i)]) + 4e-6);
      }
    }
  }
  CHECK(memory.query(1, 37, 0) != memory.query(1, 37, 0));  // NaN: not written
  CHECK(memory.key(1, 37, 0) != memory.key(1, 37, 0));
  CHECK(memory.value(1, 37, 0) != memory.value(1, 37, 0));
}

TEST(heads_are_kept_normed_and_turned_and_no_other_row_is_written) {
  for (int64_t size : {8, 64, 72, 88}) {
    check_kept<bf16>(context, size);
    check_kept<float>(context, size);
  }
}

struct RowRange {
  int32_t begin, end;
};

template <class T>
void check_attended(const Context& context, int64_t size, int64_t rows) {
  const EncodedImage<T> image(2, size, rows);
  EncoderMemory<T> memory(image, round_up(rows, kLanes) + 32);
  memory.keep_all(context.runtime());
  const int64_t count = std::min<int64_t>(rows, 9), start = rows - count;
  std::vector<RowRange> bounds(size_t(count), {0, int32_t(rows)});
  if (count == 9) bounds[2] = {5, int32_t(rows) - 1}, bounds[5] = {int32_t(rows) - 3, int32_t(rows)};
  const std::vector<T> out = memory.attend(context.runtime(1), start, count, &bounds[0].begin);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t head = 0; head < image.heads; head++) {
      std::vector<double> sums(static_cast<size_t>(size));
      double total = 0, magnitude = 0;
      for (int64_t k = bounds[size_t(i)].begin; k < bounds[size_t(i)].end; k++) {
        double score = 0;
        for (int64_t d = 0; d < size; d++) score += double(memory.query(head, start + i, d)) * memory.key(head, k, d);
        const double weight = std::exp(score * 0.25);
        total += weight;
        for (int64_t d = 0; d < size; d++) sums[size_t(d)] += weight * memory.value(head, k, d);
      }
      for (double& sum : sums) sum /= total, magnitude = std::max(magnitude, std::abs(sum));
      for (int64_t d = 0; d < size; d++) {
        const double tolerance = kStep<T> == 2 ? 0.02 : 2e-5;
        CHECK_NEAR(widen(out[size_t((i * image.heads + head) * size + d)]), sums[size_t(d)], tolerance * magnitude);
      }
    }
  }
}

TEST(attention_over_an_image_agrees_with_double_precision) {
  for (int64_t size : {8, 64, 72, 80, 88}) {
    check_attended<bf16>(context, size, 530);
    check_attended<float>(context, size, 530);
  }
  for (int64_t rows : {1, 15, 16, 17, 512}) {
    check_attended<bf16>(context, 24, rows);
    check_attended<float>(context, 24, rows);
  }
}

template <class T>
bool is_row(const std::vector<T>& all, int64_t at, const std::vector<T>& block, int64_t index, int64_t width) {
  return same_bits(all.data() + at * width, block.data() + index * width, width);
}

// Compares every block with the image in one; the memories differ in size and in what is behind the image.
template <class T>
void check_blocks(const Context& context, int64_t size, int64_t rows) {
  const EncodedImage<T> image(3, size, rows);
  EncoderMemory<T> whole(image, round_up(rows, kLanes)), larger(image, round_up(rows, kLanes) + 48);
  whole.keep_all(context.runtime());
  for (int64_t at = 0, n = 1; at < rows; at += n, n = n * 2 + 1) larger.keep(context.runtime(2), at, std::min(n, rows - at));
  const std::vector<T> expected = whole.attend(context.runtime(), 0, rows);
  for (int64_t count : context.quick ? std::vector<int64_t>{1, 5, 65} : std::vector<int64_t>{1, 2, 3, 5, 6, 7, 16, 63, 64, 65, 129}) {
    for (int64_t start : {int64_t(0), int64_t(13), rows - count}) {
      if (start < 0 || start + count > rows) continue;
      for (size_t threads = 0; threads < context.executors.size(); threads++) {
        const std::vector<T> block = larger.attend(context.runtime(threads), start, count);
        for (int64_t i = 0; i < count; i++) CHECK(is_row(expected, start + i, block, i, image.width()));
      }
    }
  }
}

TEST(a_row_of_an_image_does_not_depend_on_its_block_or_on_memory_behind_the_image) {
  for (int64_t rows : {150, 531}) {
    check_blocks<bf16>(context, 72, rows);
    check_blocks<float>(context, 72, rows);
  }
}

template <class T>
void check_bounds(const Context& context) {
  const EncodedImage<T> image(2, 40, 600);
  EncoderMemory<T> memory(image, 608);
  memory.keep_all(context.runtime());
  std::vector<RowRange> bounds;  // windows, some of which cross a span, and one that sees nothing
  for (int32_t row = 0; row < 600; row++) bounds.push_back({row / 64 * 64, std::min(row / 64 * 64 + 64, 600)});
  for (int32_t row = 500; row < 520; row++) bounds[size_t(row)] = {row - 40, row + 7};
  bounds[30] = {9, 9};
  const std::vector<T> all = memory.attend(context.runtime(2), 0, 600, &bounds[0].begin);
  for (int64_t row = 0; row < 600; row += context.quick ? 7 : 1) {
    const std::vector<T> alone = memory.attend(context.runtime(), row, 1, &bounds[size_t(row)].begin);
    CHECK(is_row(all, row, alone, 0, image.width()));
  }
  for (int64_t i = 0; i < image.width(); i++) CHECK(widen(all[size_t(30 * image.width() + i)]) == 0.0f);
  // Rows that a query does not see may hold anything of the image's.
  EncodedImage<T> poisoned = image;
  for (int64_t i = 0; i < 3 * image.width(); i++) set(poisoned.qkv[size_t(100 * 3 * image.width() + i)], kNaN);
  EncoderMemory<T> other(poisoned, 608);
  other.keep_all(context.runtime());
  const std::vector<T> after = other.attend(context.runtime(1), 0, 600, &bounds[0].begin);
  for (int64_t row = 0; row < 600; row++) {
    if (row / 64 != 100 / 64) CHECK(is_row(all, row, after, row, image.width()));
  }
}

TEST(a_row_with_bounds_does_not_depend_on_its_neighbours_or_on_rows_it_does_not_see) {
  check_bounds<bf16>(context);
  check_bounds<float>(context);
}

TEST(rows_of_images_are_kept_and_placed_by_slot_and_part) {
  Random random(8);
  const int64_t width = 37;
  std::vector<bf16> rows = random_values<bf16>(random, 4 * width), images(size_t(6 * 3 * width), bf16{0x7fff});
  const std::vector<int32_t> slots{4, -1, 0, 6};  // the last one is no slot
  keep_rows({{4, width, 6, 3, 1, slots.data()}, 2, rows.data(), images.data()});
  for (int64_t at = 0; at < 6 * 3; at++) {
    const bf16* row = images.data() + at * width;
    if (at == 4 * 3 + 1) CHECK(same_bits(row, rows.data(), width));
    if (at == 1) CHECK(same_bits(row, rows.data() + 2 * width, width));
    if (at != 4 * 3 + 1 && at != 1) CHECK(row[0].bits == 0x7fff && row[width - 1].bits == 0x7fff);
  }
  std::vector<float> x = random_values<float>(random, 4 * width), before = x;
  place_rows(context.runtime(1), DType::kBf16, {{4, width, 6, 3, 1, slots.data()}, images.data(), x.data(), false});
  for (int64_t i = 0; i < width; i++) {
    CHECK(x[size_t(i)] == widen(rows[size_t(i)]) && x[size_t(2 * width + i)] == widen(rows[size_t(2 * width + i)]));
  }
  CHECK(same_bits(x.data() + width, before.data() + width, width));
  CHECK(same_bits(x.data() + 3 * width, before.data() + 3 * width, width));
  x = before;
  place_rows(context.runtime(2), DType::kBf16, {{4, width, 6, 3, 1, slots.data()}, images.data(), x.data(), true});
  for (int64_t i = 0; i < width; i++) CHECK(x[size_t(i)] == before[size_t(i)] + widen(rows[size_t(i)]));
}

constexpr int64_t kGoldenRows = 521, kGoldenWidth = 2 * 72;

// The digest of a layer's attention over an image, of its norm, and of each activation.
template <class T>
uint64_t golden_digest(const Runtime& runtime) {
  const EncodedImage<T> image(2, 72, kGoldenRows);
  EncoderMemory<T> memory(image, 528);
  memory.keep_all(runtime);
  std::vector<T> attended = memory.attend(runtime, 0, kGoldenRows), out(attended.size());
  uint64_t state = 14695981039346656037ull;  // FNV-1a
  auto add = [&](const std::vector<T>& values) {
    for (uint8_t byte : bytes_of(values)) state = (state ^ byte) * 1099511628211ull;
  };
  add(attended);
  Random random(11);
  const std::vector<float> x = random_values<float>(random, kGoldenRows * kGoldenWidth);
  const std::vector<float> weight = random_values<float>(random, kGoldenWidth);
  layer_norm(runtime, dtype_of<T>(), {kGoldenRows, kGoldenWidth, x.data(), weight.data(), weight.data(), 1e-6f, out.data()});
  add(out);
  for (int kind = 0; kind < kNumEncoderActivations; kind++) {
    activate(runtime, dtype_of<T>(), {kGoldenRows, kGoldenWidth, attended.data(), EncoderActivation(kind), out.data()});
    add(out);
  }
  return state;
}

void check_golden(const char* type, uint64_t found, uint64_t recorded) {
  if (found == recorded) return;
  char text[96];
  std::snprintf(text, sizeof(text), "a tower in %s: 0x%016llx", type, (unsigned long long)found);
  fail(__FILE__, __LINE__, text);
}

// As the streams of golden_test.cpp. The class of tiles computes a tower like the portable one.
TEST(a_towers_operations_have_the_recorded_bits) {
  for (size_t threads = 0; threads < context.executors.size(); threads++) {
    check_golden("f32", golden_digest<float>(context.runtime(threads)), 0xff3527675c52caea);
    const bool is_recorded = !has_bf16_instructions(context.kernels.isa) || has_tiles(context.kernels.isa);
    if (is_recorded) check_golden("bf16", golden_digest<bf16>(context.runtime(threads)), 0x7bf230e7fe6f59cc);
  }
}

}  // namespace
}  // namespace cadenza::tests
