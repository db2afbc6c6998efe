// Products with e4m3 weights: every code, the definition of core/float8.h bit for bit, independence of
// the batch.
#include <algorithm>
#include <tuple>

#include "core/float8.h"
#include "tests/exactness.h"

namespace cadenza::tests {
namespace {

uint8_t random_code(Random& random) {
  const int code = random.below(254);  // no NaN
  return uint8_t(code < 127 ? code : code + 1);
}

struct Codes8 {
  int64_t n, k, blocks;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  Aligned packed;

  Codes8(Random& random, int64_t n_, int64_t k_, Executor& executor)
      : n(n_),
        k(k_),
        blocks(ceil_div(k_, kFloat8Block)),
        packed(ceil_div(n_, kPanel) * panel_bytes(WeightFormat::kFloat8, k_)) {
    for (int64_t i = 0; i < n * k; i++) codes.push_back(random_code(random));
    for (int64_t i = 0; i < n * blocks; i++) scales.push_back(0.01f + std::abs(random.normal()));
    pack(executor);
  }
  Float8Source source() const { return {codes.data(), n, k, scales.data()}; }
  void pack(Executor& executor) {
    pack_float8(executor, {{source()}, k, static_cast<uint8_t*>(packed.data()), false});
  }
};

template <class T>
ProductTypes types() {
  return {WeightFormat::kFloat8, dtype_of<T>()};
}

template <class T>
std::vector<float> product(const Runtime& runtime, Codes8& w, const std::vector<T>& x,
                           int64_t rows) {
  std::vector<float> out(size_t(rows * w.n));
  linear(runtime, types<T>(),
         {rows, w.n, w.k, x.data(), w.packed.data(), nullptr, nullptr, out.data(), true});
  return out;
}

// The dense product of one block's elements.
template <class T>
std::vector<float> block_sums(const Context& context, const Codes8& w, const std::vector<T>& x,
                              int64_t rows, int64_t block) {
  const int64_t begin = block * kFloat8Block, k = std::min<int64_t>(kFloat8Block, w.k - begin);
  std::vector<float> values(size_t(w.n * k)), out(size_t(rows * w.n));
  std::vector<T> part(size_t(rows * k));
  for (int64_t i = 0; i < w.n * k; i++) {
    values[size_t(i)] = float8_value(w.codes[size_t(i / k * w.k + begin + i % k)]);
  }
  for (int64_t i = 0; i < rows * k; i++) part[size_t(i)] = x[size_t(i / k * w.k + begin + i % k)];
  Aligned packed(packed_bytes(w.n, k, dtype_of<T>(), false));
  pack(*context.executors[0],
       {{{values.data(), DType::kF32, w.n, k}}, k, packed.data(), dtype_of<T>(), false});
  // A table of tiles has the products of a portable one for these weights.
  const Runtime runtime = context.runtime();
  const bool by_tiles = has_tiles(context.kernels.isa);
  const Runtime dense{by_tiles ? portable_kernels() : runtime.kernels, runtime.integer,
                      runtime.executor};
  linear(dense, dtype_of<T>(),
         {rows, w.n, k, part.data(), packed.data(), nullptr, nullptr, out.data(), true});
  return out;
}

template <class T>
std::vector<float> definition(const Context& context, const Codes8& w, const std::vector<T>& x,
                              int64_t rows) {
  std::vector<float> out(size_t(rows * w.n), 0.0f);
  for (int64_t b = 0; b < w.blocks; b++) {
    std::vector<float> sums = block_sums(context, w, x, rows, b);
    for (size_t i = 0; i < out.size(); i++) {
      const float scale = w.scales[i % size_t(w.n) * size_t(w.blocks) + size_t(b)];
      out[i] = std::fma(sums[i], scale, out[i]);
    }
  }
  return out;
}

template <class T>
void check_definition(const Context& context, int64_t n, int64_t k) {
  Random random(uint64_t(n * 1000 + k));
  Codes8 w(random, n, k, *context.executors[0]);
  const int64_t most = context.quick ? 33 : 257;
  std::vector<T> x = random_values<T>(random, most * k);
  std::vector<float> expected = definition(context, w, x, most);
  for (int64_t rows : batch_sizes(context.quick, int(most))) {
    std::vector<float> out = product(context.runtime(size_t(rows % 3)), w, x, rows);
    CHECK(same_bits(out.data(), expected.data(), rows * n));
  }
}

TEST(a_float8_product_is_its_definition) {
  for (auto [n, k] : {std::pair{70, 256}, {33, 31}, {20, 300}, {1, 1}, {45, 129}, {64, 128}}) {
    check_definition<bf16>(context, n, k);
    check_definition<float>(context, n, k);
  }
}

// In f32, without the dense kernels.
TEST(a_float8_product_folds_its_blocks_in_ascending_order) {
  Random random(4);
  Codes8 w(random, 37, 333, *context.executors[0]);
  std::vector<float> x = random_values<float>(random, w.k), out = product(context.runtime(), w, x, 1);
  for (int64_t c = 0; c < w.n; c++) {
    float sum = 0, block = 0;
    for (int64_t i = 0; i < w.k; i++) {
      block = std::fma(float8_value(w.codes[size_t(c * w.k + i)]), x[size_t(i)], block);
      if (i + 1 < w.k && (i + 1) % kFloat8Block != 0) continue;
      sum = std::fma(block, w.scales[size_t(c * w.blocks + i / kFloat8Block)], sum);
      block = 0;
    }
    CHECK(same_bits(&out[size_t(c)], &sum, 1));
  }
}

template <class T>
void check_codes(const Context& context) {
  Random random(5);
  Codes8 w(random, 256, 3, *context.executors[0]);
  for (int64_t at = 0; at < w.k; at++) {
    std::fill(w.codes.begin(), w.codes.end(), uint8_t(0));
    std::fill(w.scales.begin(), w.scales.end(), 1.0f);
    for (int64_t c = 0; c < w.n; c++) w.codes[size_t(c * w.k + at)] = uint8_t(c);
    w.pack(*context.executors[1]);
    std::vector<T> x(size_t(w.k));
    for (T& value : x) set(value, 1.0f);
    std::vector<float> out = product(context.runtime(), w, x, 1);
    for (int64_t c = 0; c < w.n; c++) {
      const float expected = float8_value(uint8_t(c));
      CHECK(std::isnan(expected) ? std::isnan(out[size_t(c)]) : out[size_t(c)] == expected);
    }
  }
}

TEST(every_float8_code_has_its_value) {
  CHECK(float8_value(1) == 0x1p-9f && float8_value(7) == 7 * 0x1p-9f);
  CHECK(float8_value(8) == 0x1p-6f && float8_value(0x7e) == 448 && float8_value(0xb8) == -1);
  check_codes<bf16>(context);
  check_codes<float>(context);
}

template <class T>
void check_batches(const Context& context, int64_t k, int most) {
  Random random(6);
  Codes8 w(random, 77, k, *context.executors[0]);
  std::vector<T> x = random_values<T>(random, most * w.k);
  auto run = [&](const RowBatch& batch) {
    std::vector<T> taken = take_rows(batch, x, w.k);
    return bytes_of(product(context.runtime(batch.threads), w, taken, int64_t(batch.rows.size())));
  };
  check_exact(context, {"float8 linear", w.n * 4, most, run});
}

TEST(a_float8_row_does_not_depend_on_its_batch) {
  const int most = context.quick ? 65 : 257;
  check_batches<bf16>(context, 151, most);
  check_batches<float>(context, 151, most);
}

TEST(a_float8_row_that_is_copied_apart_from_others_does_not_depend_on_its_batch) {
  check_batches<bf16>(context, 2048, 33);
  check_batches<float>(context, 2048, 33);
}

TEST(a_nan_code_and_a_nan_scale_spoil_their_column_only) {
  Random random(7);
  Codes8 w(random, 40, 200, *context.executors[0]);
  w.codes[size_t(3 * w.k + 199)] = 0xff;
  w.scales[size_t(35 * w.blocks)] = kNaN;
  w.pack(*context.executors[0]);
  std::vector<float> x(size_t(w.k), 0.0f), out = product(context.runtime(), w, x, 1);
  for (int64_t c = 0; c < w.n; c++) CHECK(std::isnan(out[size_t(c)]) == (c == 3 || c == 35));
}

TEST(gated_float8_columns_are_those_of_the_two_products) {
  Random random(8);
  const int64_t f = 37, k = 145, rows = 17;
  Codes8 gate(random, f, k, *context.executors[0]), up(random, f, k, *context.executors[0]);
  for (float& scale : gate.scales) scale *= 1e-3f;
  gate.pack(*context.executors[0]);
  Aligned packed(ceil_div(f, kLanes) * panel_bytes(WeightFormat::kFloat8, k));
  pack_float8(*context.executors[1],
              {{gate.source(), up.source()}, k, static_cast<uint8_t*>(packed.data()), true});
  std::vector<float> x = random_values<float>(random, rows * k), out(size_t(rows * f));
  gated_linear(context.runtime(2), types<float>(),
               {rows, f, k, x.data(), packed.data(), nullptr, Activation::kSilu, out.data()});
  std::vector<float> gates = product(context.runtime(), gate, x, rows);
  std::vector<float> ups = product(context.runtime(), up, x, rows);
  for (size_t i = 0; i < out.size(); i++) {
    const double g = gates[i], expected = g / (1 + std::exp(-g)) * double(ups[i]);
    CHECK_NEAR(out[i], expected, 1e-5 * (1 + std::abs(expected)));
  }
}

TEST(each_experts_float8_output_is_that_of_the_dense_product) {
  Random random(9);
  const int64_t experts = 3, rows = 19, n = 45, k = 170;
  const int64_t bytes = ceil_div(n, kPanel) * panel_bytes(WeightFormat::kFloat8, k);
  std::vector<Codes8> weights;
  Aligned packed(experts * bytes);
  for (int64_t e = 0; e < experts; e++) {
    weights.emplace_back(random, n, k, *context.executors[0]);
    std::memcpy(static_cast<uint8_t*>(packed.data()) + e * bytes, weights.back().packed.data(),
                size_t(bytes));
  }
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; r++) ids.push_back(int32_t(random.below(3)));
  std::vector<bf16> x = random_values<bf16>(random, rows * k);
  std::vector<float> ones(size_t(rows), 1.0f), out(size_t(rows * n));
  LinearTask task{rows, n, k, x.data(), packed.data(), nullptr, nullptr, out.data(), true};
  grouped_linear(context.runtime(2), types<bf16>(), {task, {experts, 1, ids.data()}, ones.data()});
  for (int64_t r = 0; r < rows; r++) {
    std::vector<bf16> row(x.begin() + r * k, x.begin() + (r + 1) * k);
    std::vector<float> alone = product(context.runtime(), weights[size_t(ids[size_t(r)])], row, 1);
    CHECK(same_bits(out.data() + r * n, alone.data(), n));
  }
}

TEST(the_head_chooses_the_largest_float8_logit) {
  Random random(10);
  const int64_t rows = 21;
  Codes8 w(random, 1003, 170, *context.executors[0]);
  std::vector<bf16> x = random_values<bf16>(random, rows * w.k);
  std::vector<float> logits = product(context.runtime(1), w, x, rows);
  std::vector<SampleParams> params(size_t(rows), SampleParams{0, 0, 1, 0, {0, 0}, -1});
  std::vector<int32_t> out(size_t(rows * kSampleColumns));
  LinearTask head{rows, w.n, w.k, x.data(), w.packed.data(), nullptr, nullptr, nullptr, false};
  next_token(context.runtime(2), types<bf16>(), {head, params.data(), out.data(), {}});
  for (int64_t r = 0; r < rows; r++) {
    const float* row = logits.data() + r * w.n;
    CHECK(out[size_t(r * kSampleColumns + kColumnToken)] == std::max_element(row, row + w.n) - row);
  }
}

}  // namespace
}  // namespace cadenza::tests
