// Products of quantised weights by tiles have the bits of those by vectors: every format, number of
// rows and operation. The tiles are a model of them.
#include <algorithm>
#include <stdexcept>

#include "core/quantised.h"
#include "tests/exactness.h"

namespace cadenza::tests {

// Of isa/int8_amx_emulated.cpp, whose table multiplies all rows by tiles.
std::vector<int> measured_tile_rows();
int stated_tile_rows(const std::string& text);

namespace {

constexpr ProductTypes kTypes{WeightFormat::kCodes, DType::kF32};

uint16_t random_half(Random& random) { return uint16_t(0x2000 + random.below(0x1000)); }

// Random scales, or offsets, of a part of a group.
void fill_scales(Random& random, const CodeFormat& format, uint8_t* to, int64_t bytes) {
  const int64_t size = format.scale_size();
  for (int64_t at = 0; at < bytes; at += size) {
    const float value = random.normal();
    uint32_t raw;
    std::memcpy(&raw, &value, sizeof(raw));
    const uint16_t half = random_half(random), power = uint16_t((120 + random.below(10)) << 7);
    if (format.scale == ScaleType::kF32) std::memcpy(to + at, &raw, 4);
    if (format.scale == ScaleType::kF16) std::memcpy(to + at, &half, 2);
    if (format.scale == ScaleType::kBf16) std::memcpy(to + at, &power, 2);
    if (format.scale == ScaleType::kNested) to[at] = uint8_t(random.below(256));
  }
}

void fill_panel(Random& random, const CodeFormat& format, int64_t k, uint8_t* panel) {
  for (int64_t at = 0; at < format.groups_at(k); at += 2) {
    const uint16_t half = random_half(random);
    std::memcpy(panel + at, &half, 2);
  }
  uint8_t* group = panel + format.groups_at(k);
  for (int64_t g = 0; g < ceil_div(k, kGroup); g++, group += format.group_bytes()) {
    for (int64_t i = 0; i < format.code_bytes(); i++) group[i] = uint8_t(random.next());
    fill_scales(random, format, group + format.code_bytes(), format.scale_bytes());
    uint8_t* corrections = group + format.corrections_at();
    if (format.correction == Correction::kOffset) {
      fill_scales(random, format, corrections, format.correction_bytes());
    } else {
      for (int64_t i = 0; i < format.correction_bytes(); i++) {
        corrections[i] = uint8_t(random.below(16));
      }
    }
  }
}

// A weight whose panels have these formats, one after another.
Aligned random_weight(Random& random, int64_t k, const std::vector<int>& formats, int experts = 1) {
  CodesHeader header{CodesHeader::kVersion, int16_t(formats.size()), 0, k, {}};
  for (size_t i = 0; i < formats.size(); i++) header.segments[i] = {formats[i], 1};
  Aligned weight(header.num_bytes() * experts);
  auto* to = static_cast<uint8_t*>(weight.data());
  for (int expert = 0; expert < experts; expert++) {
    std::memcpy(to, &header, sizeof(header));
    to += header.panels_at();
    for (int format : formats) {
      fill_panel(random, kCodeFormats[format], k, to);
      to += code_panel_bytes(format, k);
    }
  }
  return weight;
}

Runtime by_tiles(const Context& context, size_t which = 0) {
  return {context.kernels, integer_kernels_for("amx_emulated", ""), *context.executors[which]};
}

// Once, with the best ISA: the tables here are the same for all.
bool is_first_isa(const Context& context) {
  return available_isas().front() == std::string(context.kernels.isa);
}

std::vector<float> linear_of(const Runtime& runtime, int64_t n, int64_t k, const void* weight,
                             const std::vector<float>& x) {
  const int64_t rows = int64_t(x.size()) / k;
  std::vector<float> out(size_t(rows * n));
  linear(runtime, kTypes, {rows, n, k, x.data(), weight, nullptr, nullptr, out.data(), true});
  return out;
}

TEST(tiles_multiply_every_format_with_the_bits_of_vectors) {
  if (!is_first_isa(context)) return;
  Random random(51);
  for (int format = 0; format < kNumCodeFormats; format++) {
    for (int64_t k : {1, 31, 100, 256, 576, 2112}) {
      const int64_t n = 50, rows = k < 600 ? 37 : 18;
      Aligned weight = random_weight(random, k, {format, format});
      const std::vector<float> x = random_values<float>(random, rows * k);
      for (int64_t count : {int64_t(1), int64_t(7), int64_t(16), rows}) {
        const std::vector<float> some(x.begin(), x.begin() + count * k);
        const auto found = linear_of(by_tiles(context), n, k, weight.data(), some);
        const auto expected = linear_of(context.runtime(), n, k, weight.data(), some);
        CHECK(same_bits(found.data(), expected.data(), count * n));
        CHECK(k == 1 || found[0] != found[1]);  // one product may be 0 in both
      }
    }
  }
}

TEST(tiles_of_panels_with_several_formats_have_the_bits_of_vectors) {
  if (!is_first_isa(context)) return;
  Random random(52);
  const std::vector<int> formats{kInt8Format, 12, 14, kInt4Format, 18, 11};
  const int64_t n = 180, k = 300, rows = 21;
  Aligned weight = random_weight(random, k, formats);
  const std::vector<float> x = random_values<float>(random, rows * k);
  const auto expected = linear_of(context.runtime(), n, k, weight.data(), x);
  for (size_t which : {0, 1, 2}) {
    const auto found = linear_of(by_tiles(context, which), n, k, weight.data(), x);
    CHECK(same_bits(found.data(), expected.data(), rows * n));
  }
}

TEST(a_row_multiplied_by_tiles_does_not_depend_on_its_batch) {
  if (!is_first_isa(context)) return;
  Random random(53);
  const int most = context.quick ? 129 : 513;
  const int64_t n = 64, k = 151;
  for (const std::vector<int>& formats : {std::vector<int>{kInt8Format, 14}, {kInt4Format, 12}}) {
    Aligned weight = random_weight(random, k, formats);
    const std::vector<float> x = random_values<float>(random, most * k);
    auto run = [&](const RowBatch& batch) {
      return bytes_of(linear_of(by_tiles(context, batch.threads), n, k, weight.data(),
                                take_rows(batch, x, k)));
    };
    check_exact(context, {"linear by tiles", n * 4, most, run});
  }
}

std::vector<float> gated_of(const Runtime& runtime, int64_t f, int64_t k, const void* weight,
                            const std::vector<float>& x) {
  const int64_t rows = int64_t(x.size()) / k;
  std::vector<float> out(size_t(rows * f));
  gated_linear(runtime, kTypes,
               {rows, f, k, x.data(), weight, nullptr, Activation::kSilu, out.data()});
  return out;
}

TEST(a_gated_product_by_tiles_has_the_bits_of_vectors) {
  if (!is_first_isa(context)) return;
  Random random(54);
  const int64_t f = 31, k = 130, rows = 35;
  Aligned weight = random_weight(random, k, {12, 12});
  const std::vector<float> x = random_values<float>(random, rows * k);
  const auto expected = gated_of(context.runtime(), f, k, weight.data(), x);
  const auto found = gated_of(by_tiles(context), f, k, weight.data(), x);
  CHECK(same_bits(found.data(), expected.data(), rows * f));
}

std::vector<float> experts_of(const Runtime& runtime, const LinearTask& task,
                              const ExpertChoice& choice) {
  std::vector<float> out(size_t(task.rows * task.n));
  const std::vector<float> weights(size_t(choice.num_pairs(task.rows)), 0.5f);
  LinearTask own = task;
  own.out = out.data();
  grouped_linear(runtime, kTypes, {own, choice, weights.data()});
  return out;
}

TEST(experts_by_tiles_have_the_bits_of_vectors) {
  if (!is_first_isa(context)) return;
  Random random(55);
  const int64_t experts = 4, rows = 40, n = 60, k = 100;
  Aligned weight = random_weight(random, k, {12, 14}, int(experts));
  const std::vector<float> x = random_values<float>(random, rows * k);
  std::vector<int32_t> few, same(size_t(rows), 2);  // one expert has 2 rows, one has none; all one
  for (int64_t row = 0; row < rows; row++) few.push_back(row < 2 ? 0 : row % 2 == 0 ? 1 : 3);
  const LinearTask task{rows, n, k, x.data(), weight.data(), nullptr, nullptr, nullptr, true};
  for (const std::vector<int32_t>& ids : {few, same}) {
    const ExpertChoice choice{experts, 1, ids.data()};
    const auto expected = experts_of(context.runtime(), task, choice);
    const auto found = experts_of(by_tiles(context, 1), task, choice);
    CHECK(same_bits(found.data(), expected.data(), rows * n));
  }
}

TEST(the_head_by_tiles_chooses_the_token_of_vectors) {
  if (!is_first_isa(context)) return;
  Random random(56);
  const int64_t vocab = 190, k = 70, rows = 19;
  Aligned weight = random_weight(random, k, std::vector<int>(6, kInt8Format));
  const std::vector<float> x = random_values<float>(random, rows * k);
  std::vector<SampleParams> params(size_t(rows), SampleParams{0, 0, 1, 0, {0, 0}, -1});
  std::vector<int32_t> found[2];
  for (std::vector<int32_t>& out : found) {
    out.resize(size_t(rows * kSampleColumns));
    const LinearTask head{rows,    vocab,   k,       x.data(), weight.data(),
                          nullptr, nullptr, nullptr, false};
    const Runtime runtime = &out == found ? by_tiles(context) : context.runtime();
    next_token(runtime, kTypes, {head, params.data(), out.data(), {}});
  }
  CHECK(found[0] == found[1]);
  int64_t different = 0;
  for (int64_t row = 0; row < rows; row++) {
    different += found[0][size_t(row * kSampleColumns + kColumnToken)] != found[0][kColumnToken];
  }
  CHECK(different > 0);
}

TEST(a_row_that_is_not_finite_has_no_finite_output_by_tiles) {
  if (!is_first_isa(context)) return;
  Random random(57);
  const int64_t n = 32, k = 70;
  Aligned weight = random_weight(random, k, {12});
  for (float poison : {kNaN, kInf}) {
    std::vector<float> x = random_values<float>(random, 3 * k);
    x[size_t(k + 40)] = poison;
    const auto out = linear_of(by_tiles(context), n, k, weight.data(), x);
    for (int64_t c = 0; c < n; c++) {
      CHECK(std::isfinite(out[size_t(c)]) && std::isfinite(out[size_t(2 * n + c)]));
      CHECK(std::isnan(out[size_t(n + c)]));
    }
  }
}

TEST(rows_from_which_tiles_are_faster_are_measured) {
  if (!is_first_isa(context)) return;
  const std::vector<int> allowed{4, 8, 16, 32, kNeverByTiles};
  for (int rows : measured_tile_rows()) {
    CHECK(std::find(allowed.begin(), allowed.end(), rows) != allowed.end());
  }
}

TEST(rows_for_tiles_are_a_number_or_never) {
  CHECK(stated_tile_rows("9") == 9 && stated_tile_rows("never") == kNeverByTiles);
  for (const char* wrong : {"0", "-3", "some", "4 rows", "99999999"}) {
    std::string message;
    try {
      stated_tile_rows(wrong);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK(message.find(wrong) != std::string::npos);
    CHECK(message.find("or never") != std::string::npos);
  }
}

}  // namespace
}  // namespace cadenza::tests
