// Quantised products: the definition bit for bit on every integer ISA, independence of the
// batch.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "core/half.h"
#include "core/quantised.h"
#include "tests/exactness.h"

namespace cadenza::tests {
namespace {

constexpr int kFormats[] = {kInt8Format, kInt4Format};  // those that floats are quantised to

struct Codes {
  int format;
  int64_t n, k;
  std::vector<int32_t> order;  // of the inputs, or empty
  std::vector<float> rows;
  Aligned packed;

  Codes(Random& random, int format_, int64_t n_, int64_t k_, Executor& executor,
        const std::vector<int32_t>& order_ = {})
      : format(format_),
        n(n_),
        k(k_),
        order(order_),
        rows(random_values<float>(random, n_ * k_, 0.2f)),
        packed(num_bytes()) {
    pack_rows({{rows.data(), DType::kF32, n, k}, format, 0, nullptr, nullptr, nullptr, 0}, executor);
  }

  void pack_rows(const CodeSource& source, Executor& executor) {
    uint8_t* to = static_cast<uint8_t*>(packed.data());
    pack_quantised(executor, {{source}, k, to, num_bytes(), false, order.empty() ? nullptr : order.data()});
  }
  int64_t num_bytes() const {
    const int64_t panels_at = int64_t(sizeof(CodesHeader)) + (order.empty() ? 0 : round_up(4 * k, 64));
    return panels_at + ceil_div(n, kPanel) * code_panel_bytes(format, k);
  }
  ProductTypes types() const { return {WeightFormat::kCodes, DType::kF32}; }
  const uint8_t* group(int64_t column, int64_t g) {
    return code_panel(packed.data(), column / kPanel).data + g * kCodeFormats[format].group_bytes();
  }
  int64_t code_bytes() const { return kCodeFormats[format].code_bytes(); }
  // A code without its zero point.
  int code(int64_t column, int64_t i) {
    const uint8_t* from = group(column, i / kGroup);
    const int64_t at = i % kGroup, lane = column % kPanel;
    if (format == kInt8Format) return from[(at / 4 * kPanel + lane) * 4 + at % 4] - 128;
    int byte = from[(at / 8 * kPanel + lane) * 4 + at % 4];
    return (at % 8 < 4 ? byte & 15 : byte >> 4) - from[code_bytes() + kPanel * 2 + lane];
  }
  float scale(int64_t column, int64_t g) {
    uint16_t half;
    std::memcpy(&half, group(column, g) + code_bytes() + column % kPanel * 2, 2);
    return f16_to_f32(half);
  }
};

float largest_of(const float* x, int64_t begin, int64_t end) {
  float largest = 0;
  for (int64_t i = begin; i < end; i++) largest = std::max(largest, std::abs(x[i]));
  return largest >= 0x1p-64f ? largest : 0.0f;
}

int32_t code_of(float x, float largest) {
  return largest == 0 ? 0 : int32_t(std::nearbyint(x * (127.0f / largest)));
}

// One element of a product, written from the rules of core/quantised.h.
float definition(const float* x, Codes& w, int64_t column) {
  float sum = 0;
  const auto fold = [&](const float* values, int64_t begin, int64_t end) {
    const float largest = largest_of(values, begin, end);
    int32_t dot = 0;
    for (int64_t i = begin; i < end; i++) dot += code_of(values[i], largest) * w.code(column, i);
    sum = std::fma(float(dot) * (largest / 127.0f), w.scale(column, begin / kGroup), sum);
  };
  for (int64_t begin = 0; begin < w.k; begin += kGroup) fold(x, begin, std::min(begin + kGroup, w.k));
  for (int64_t span = 0; span < w.k; span += kGroup * kRemainderSpan) {
    int64_t chosen = span;
    float most = 0;
    for (int64_t begin = span; begin < std::min(span + kGroup * kRemainderSpan, w.k); begin += kGroup) {
      const float largest = largest_of(x, begin, std::min(begin + kGroup, w.k));
      if (largest > most) most = largest, chosen = begin;
    }
    std::vector<float> left(x, x + w.k);
    for (float& each : left) each = std::fma(float(-code_of(each, most)), most / 127.0f, each);
    if (most > 0) fold(left.data(), chosen, std::min(chosen + kGroup, w.k));
  }
  return sum;
}

std::vector<float> product(const Runtime& runtime, Codes& w, const std::vector<float>& x,
                           int64_t rows) {
  std::vector<float> out(size_t(rows * w.n));
  linear(runtime, w.types(),
         {rows, w.n, w.k, x.data(), w.packed.data(), nullptr, nullptr, out.data(), true});
  return out;
}

// The indices below k, shuffled.
std::vector<int32_t> random_order(Random& random, int64_t k) {
  std::vector<int32_t> order;
  for (int64_t i = 0; i < k; i++) order.push_back(int32_t(i));
  for (int64_t i = k - 1; i > 0; i--) std::swap(order[size_t(i)], order[random.below(uint64_t(i + 1))]);
  return order;
}

// The context's runtime with every integer ISA of this machine; only with the best ISA.
std::vector<Runtime> runtimes(const Context& context) {
  Runtime own = context.runtime(1);
  if (available_isas().front() != context.kernels.isa) return {own};
  std::vector<Runtime> all;
  for (const std::string& name : available_integer_isas()) {
    all.push_back({own.kernels, integer_kernels_for(name, ""), own.executor});
  }
  return all;
}

TEST(a_quantised_product_is_its_definition_on_every_integer_isa) {
  for (auto [format, n, k] : {std::tuple{kInt8Format, 70, 96},
                              {kInt8Format, 33, 31},
                              {kInt8Format, 20, 130},
                              {kInt8Format, 1, 1},
                              {kInt8Format, 3, 4200},
                              {kInt4Format, 70, 96},
                              {kInt4Format, 33, 31},
                              {kInt4Format, 20, 130},
                              {kInt4Format, 1, 1}}) {
    Random random(uint64_t(n * 1000 + k));
    Codes w(random, format, n, k, *context.executors[0]);
    const int64_t rows = context.quick ? 17 : 65;
    std::vector<float> x = random_values<float>(random, rows * k);
    for (int64_t i = 0; i < k; i++) x[size_t(i)] *= 1e-30f;  // a row that counts as zero
    std::vector<float> expected;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < n; c++) expected.push_back(definition(x.data() + r * k, w, c));
    }
    for (const Runtime& runtime : runtimes(context)) {
      std::vector<float> out = product(runtime, w, x, rows);
      if (same_bits(out.data(), expected.data(), rows * n)) continue;
      fail(__FILE__, __LINE__, runtime.integer.isa);
    }
  }
}

TEST(an_ordered_product_is_that_of_the_ordered_inputs) {
  Random random(4);
  const int64_t n = 40, rows = 21;
  for (int64_t k : {1, 31, 70, 130}) {
    const std::vector<int32_t> order = random_order(random, k);
    for (int format : kFormats) {
      Codes plain(random, format, n, k, *context.executors[0]);
      Codes ordered(random, format, n, k, *context.executors[0], order);
      ordered.rows = plain.rows;
      ordered.pack_rows({{plain.rows.data(), DType::kF32, n, k}, format, 0, nullptr, nullptr, nullptr, 0},
                        *context.executors[0]);
      std::vector<float> x = random_values<float>(random, rows * k), sorted(x);
      for (int64_t i = 0; i < rows * k; i++) {
        sorted[size_t(i)] = x[size_t(i / k * k + order[size_t(i % k)])];
      }
      for (const Runtime& runtime : runtimes(context)) {
        const std::vector<float> found = product(runtime, ordered, x, rows);
        const std::vector<float> expected = product(runtime, plain, sorted, rows);
        CHECK(same_bits(found.data(), expected.data(), rows * n));
      }
    }
  }
}

TEST(an_order_that_lacks_an_input_is_refused) {
  Random random(3);
  for (int32_t wrong : {1, -1, 3}) {
    bool is_refused = false;
    try {
      Codes(random, kInt8Format, 5, 3, *context.executors[0], {0, 1, wrong});
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    CHECK(is_refused);
  }
}

// The extreme codes of both operands, where 16-bit sums of two products would saturate.
TEST(no_dot_of_extreme_codes_saturates) {
  const int64_t n = 32, k = 64;
  for (int bits : {4, 5, 8}) {
    const int format = index_of(CodeFormat{bits, 32, ScaleType::kF16, Correction::kNone});
    const int most = 1 << (bits - 1);
    const std::vector<uint16_t> scales(size_t(n * k / kGroup), 0x3c00);
    for (int code : {-most, most - 1}) {
      const std::vector<int8_t> codes(size_t(n * k), int8_t(code));
      const CodeSource source{{codes.data(), DType::kF32, n, k}, format,  format, scales.data(),
                              nullptr, nullptr, 0};
      const int64_t bytes = int64_t(sizeof(CodesHeader)) + code_panel_bytes(format, k);
      Aligned packed(bytes);
      auto* to = static_cast<uint8_t*>(packed.data());
      for (const Runtime& runtime : runtimes(context)) {
        pack_quantised(runtime.executor, {{source}, k, to, bytes, false});
        for (float sign : {1.0f, -1.0f}) {
          const std::vector<float> x(size_t(k), sign);
          std::vector<float> out(static_cast<size_t>(n));
          linear(runtime, {WeightFormat::kCodes, DType::kF32},
                 {1, n, k, x.data(), to, nullptr, nullptr, out.data(), true});
          for (float each : out) CHECK_NEAR(each, sign * float(code * k), 0.1);
        }
      }
    }
  }
}

TEST(a_quantised_row_does_not_depend_on_its_batch) {
  Random random(6);
  const int most = context.quick ? 129 : 513;
  for (int format : kFormats) {
    Codes w(random, format, 77, 151, *context.executors[0]);
    std::vector<float> x = random_values<float>(random, most * w.k);
    auto run = [&](const RowBatch& batch) {
      std::vector<float> taken = take_rows(batch, x, w.k);
      int64_t rows = int64_t(batch.rows.size());
      return bytes_of(product(context.runtime(batch.threads), w, taken, rows));
    };
    check_exact(context, {"quantised linear", w.n * 4, most, run});
  }
}

TEST(a_quantised_row_that_is_not_finite_has_no_finite_output) {
  Random random(7);
  Codes w(random, kInt4Format, 40, 70, *context.executors[0]);
  for (float poison : {kNaN, kInf, -kInf}) {
    for (int64_t at : {0, 40, 69}) {
      std::vector<float> x = random_values<float>(random, 3 * w.k);
      x[size_t(w.k + at)] = poison;
      std::vector<float> out = product(context.runtime(1), w, x, 3);
      for (int64_t c = 0; c < w.n; c++) {
        CHECK(std::isfinite(out[size_t(c)]) && std::isfinite(out[size_t(2 * w.n + c)]));
        CHECK(std::isnan(out[size_t(w.n + c)]));
      }
    }
  }
}

// With `is_ordered` the weight of each expert has the inputs in an order of its own.
void check_experts(const Context& context, int format, bool is_ordered) {
  Random random(8);
  const int64_t experts = 3, rows = 19, n = 45, k = 70;
  std::vector<Codes> weights;
  for (int64_t e = 0; e < experts; e++) {
    weights.emplace_back(random, format, n, k, *context.executors[0],
                         is_ordered ? random_order(random, k) : std::vector<int32_t>{});
  }
  const int64_t bytes = weights[0].num_bytes();
  Aligned packed(experts * bytes);
  for (int64_t e = 0; e < experts; e++) {
    std::memcpy(static_cast<uint8_t*>(packed.data()) + e * bytes, weights[size_t(e)].packed.data(),
                size_t(bytes));
  }
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; r++) ids.push_back(int32_t(random.below(3)));
  std::vector<float> x = random_values<float>(random, rows * k), ones(size_t(rows), 1.0f);
  std::vector<float> out(size_t(rows * n));
  LinearTask task{rows, n, k, x.data(), packed.data(), nullptr, nullptr, out.data(), true};
  grouped_linear(context.runtime(2), weights[0].types(), {task, {experts, 1, ids.data()}, ones.data()});
  for (int64_t r = 0; r < rows; r++) {
    std::vector<float> row(x.begin() + r * k, x.begin() + (r + 1) * k);
    std::vector<float> alone = product(context.runtime(), weights[size_t(ids[size_t(r)])], row, 1);
    CHECK(same_bits(out.data() + r * n, alone.data(), n));
  }
}

TEST(each_experts_quantised_output_is_that_of_the_dense_product) {
  for (int format : kFormats) {
    for (bool is_ordered : {false, true}) check_experts(context, format, is_ordered);
  }
}

TEST(the_head_chooses_the_largest_quantised_logit) {
  Random random(9);
  const int64_t rows = 21;
  Codes w(random, kInt8Format, 1003, 70, *context.executors[0]);
  std::vector<float> x = random_values<float>(random, rows * w.k);
  std::vector<float> logits = product(context.runtime(1), w, x, rows);
  std::vector<SampleParams> params(size_t(rows), SampleParams{0, 0, 1, 0, {0, 0}, -1});
  std::vector<int32_t> out(size_t(rows * kSampleColumns));
  LinearTask head{rows, w.n, w.k, x.data(), w.packed.data(), nullptr, nullptr, nullptr, false};
  next_token(context.runtime(2), w.types(), {head, params.data(), out.data(), {}});
  for (int64_t r = 0; r < rows; r++) {
    const float* row = logits.data() + r * w.n;
    CHECK(out[size_t(r * kSampleColumns + kColumnToken)] == std::max_element(row, row + w.n) - row);
    CHECK(out[size_t(r * kSampleColumns + kColumnState)] == kStateChosen);
  }
}

// The same codes packed in two formats.
void check_equal_products(const Context& context, Correction correction) {
  const int64_t n = 45, k = 70, rows = 7, groups = ceil_div(k, kGroup);
  Random random(11);
  const int low = correction == Correction::kNone ? -16 : 0;
  std::vector<int8_t> codes;
  for (int64_t i = 0; i < n * k; i++) codes.push_back(int8_t(low + int(random.below(32))));
  std::vector<uint16_t> scales, offsets;
  for (int64_t i = 0; i < n * groups; i++) {
    scales.push_back(uint16_t(0x2000 + random.below(4096)));
    offsets.push_back(uint16_t(0xa000 + random.below(4096)));
  }
  const int five = index_of(CodeFormat{5, 32, ScaleType::kF16, correction});
  const int eight = index_of(CodeFormat{8, 32, ScaleType::kF16, correction});
  std::vector<float> x = random_values<float>(random, rows * k);
  for (const Runtime& runtime : runtimes(context)) {
    std::vector<float> found[2];
    for (int target : {five, eight}) {
      const int64_t bytes =
          int64_t(sizeof(CodesHeader)) + ceil_div(n, kPanel) * code_panel_bytes(target, k);
      Aligned packed(bytes);
      const void* corrections = correction == Correction::kNone ? nullptr : offsets.data();
      const CodeSource source{{codes.data(), DType::kF32, n, k}, target, five, scales.data(),
                              corrections, nullptr, 0};
      auto* to = static_cast<uint8_t*>(packed.data());
      pack_quantised(runtime.executor, {{source}, k, to, bytes, false});
      std::vector<float>& out = found[target == eight];
      out.resize(size_t(rows * n));
      linear(runtime, {WeightFormat::kCodes, DType::kF32},
             {rows, n, k, x.data(), to, nullptr, nullptr, out.data(), true});
    }
    CHECK(same_bits(found[0].data(), found[1].data(), rows * n));
    CHECK(found[0][0] != found[0][1]);
  }
}

TEST(codes_of_5_bits_have_the_products_of_the_same_codes_in_8_bits) {
  check_equal_products(context, Correction::kNone);
  check_equal_products(context, Correction::kOffset);
}

// Products of the first `counts` rows of x with a source as it is packed, then three of its rows.
std::vector<float> products_and_rows(const Runtime& runtime, const CodeSource& source, int64_t k,
                                     const std::vector<float>& x,
                                     const std::vector<int64_t>& counts) {
  const int64_t n = source.rows.rows;
  const int64_t bytes =
      int64_t(sizeof(CodesHeader)) + ceil_div(n, kPanel) * code_panel_bytes(source.target, k);
  Aligned packed(bytes);
  auto* to = static_cast<uint8_t*>(packed.data());
  pack_quantised(runtime.executor, {{source}, k, to, bytes, false});
  std::vector<float> out;
  const auto take = [&](int64_t count) {
    out.resize(out.size() + size_t(count));
    return out.data() + (int64_t(out.size()) - count);
  };
  for (int64_t count : counts) {
    float* product = take(count * n);
    linear(runtime, {WeightFormat::kCodes, DType::kF32},
           {count, n, k, x.data(), to, nullptr, nullptr, product, true});
  }
  for (int32_t id = 0; id < 3; id++) {
    float* row = take(k);
    embed(runtime, WeightFormat::kCodes, {1, k, n, &id, to, true, 1.0f, row});
  }
  return out;
}

// Rows of blocks of Q6_K: any codes and scales, factors of some thousandths.
std::vector<uint8_t> random_q6_k(Random& random, int64_t rows, int64_t k) {
  constexpr int64_t kBytes = 210;
  std::vector<uint8_t> blocks;
  for (int64_t i = 0; i < rows * k / kNested * kBytes; i++) blocks.push_back(uint8_t(random.below(256)));
  for (size_t at = kBytes - 2; at < blocks.size(); at += kBytes) {
    const uint16_t factor = uint16_t(0x1800 + random.below(1024));
    std::memcpy(&blocks[at], &factor, sizeof(factor));
  }
  return blocks;
}

TEST(codes_of_6_bits_have_the_products_of_the_same_codes_in_8_bits) {
  const int64_t n = 45, k = 512, rows = 14;
  Random random(17);
  const std::vector<uint8_t> blocks = random_q6_k(random, n, k);
  const int six = index_of(CodeFormat{6, 16, ScaleType::kNested, Correction::kNone});
  const int eight = index_of(CodeFormat{8, 16, ScaleType::kF32, Correction::kNone});
  std::vector<float> x = random_values<float>(random, rows * k);
  for (const Runtime& runtime : runtimes(context)) {
    std::vector<float> found[2];
    for (int target : {six, eight}) {
      const CodeSource source{{blocks.data(), DType::kF32, n, k / kNested * 210}, target, six,
                              nullptr, nullptr, find_block_type(14), 0};
      found[target == eight] = products_and_rows(runtime, source, k, x, {1, 7, rows});
    }
    CHECK(same_bits(found[0].data(), found[1].data(), int64_t(found[0].size())));
    CHECK(found[0][5] != found[0][6]);
  }
}

TEST(codes_of_mxfp4_have_the_products_of_the_same_codes_in_8_bits) {
  const int64_t n = 45, k = 2120, rows = 7, groups = ceil_div(k, kGroup);
  Random random(13);
  std::vector<int8_t> codes;
  for (int64_t i = 0; i < n * k; i++) codes.push_back(kDoubledE2m1[random.below(16)]);
  std::vector<float> scales;
  for (int64_t i = 0; i < n * groups; i++) scales.push_back(std::ldexp(1.0f, -int(random.below(20))));
  scales[3] = std::ldexp(1.0f, -128);
  scales[4] = std::ldexp(1.0f, 127);
  const int four = index_of(CodeFormat{4, 32, ScaleType::kBf16, Correction::kNone});
  const int eight = index_of(CodeFormat{8, 32, ScaleType::kF32, Correction::kNone});
  std::vector<float> x = random_values<float>(random, rows * k);
  for (const Runtime& runtime : runtimes(context)) {
    std::vector<float> found[2];
    for (int target : {four, eight}) {
      const CodeSource source{{codes.data(), DType::kF32, n, k}, target, four, scales.data(),
                              nullptr, nullptr, 0};
      found[target == eight] = products_and_rows(runtime, source, k, x, {1, rows});
    }
    CHECK(found[0].size() == found[1].size());
    CHECK(same_bits(found[0].data(), found[1].data(), int64_t(found[0].size())));
    CHECK(found[0][5] != found[0][6]);
  }
}

TEST(packing_codes_with_their_scales_and_zero_points_keeps_them) {
  const int64_t n = 40, k = 45, groups = 2;
  Random random(10);
  std::vector<uint16_t> scales;
  std::vector<uint8_t> zeros;
  for (int64_t i = 0; i < n * groups; i++) {
    scales.push_back(uint16_t(0x2000 + random.below(4096)));
    zeros.push_back(uint8_t(random.below(16)));
  }
  for (int format : kFormats) {
    const bool is_int4 = format == kInt4Format;
    std::vector<int8_t> codes;
    for (int64_t i = 0; i < n * k; i++) {
      codes.push_back(int8_t(is_int4 ? random.below(16) : random.below(255) - 127));
    }
    Codes w(random, format, n, k, *context.executors[0]);
    const void* corrections = is_int4 ? zeros.data() : nullptr;
    w.pack_rows({{codes.data(), DType::kF32, n, k}, format, format, scales.data(), corrections, nullptr, 0},
                *context.executors[1]);
    for (int64_t c = 0; c < n; c++) {
      for (int64_t i = 0; i < k; i++) {
        const size_t at = size_t(c * groups + i / kGroup);
        CHECK(w.code(c, i) == codes[size_t(c * k + i)] - (is_int4 ? zeros[at] : 0));
        CHECK(w.scale(c, i / kGroup) == f16_to_f32(scales[at]));
      }
    }
  }
}

}  // namespace
}  // namespace cadenza::tests
