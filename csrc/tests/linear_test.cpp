// Packing and dense products: compared with double precision, and independence of rows and threads.
#include <algorithm>

#include "tests/check.h"
#include "tests/data.h"
#include "tests/exactness.h"

namespace cadenza::tests {
namespace {

template <class T>
struct Weight {
  int64_t n, k;
  std::vector<T> rows;
  Aligned packed;

  Weight(Random& random, int64_t n_, int64_t k_, Executor& executor)
      : n(n_),
        k(k_),
        rows(random_values<T>(random, n_ * k_, 0.1f)),
        packed(packed_bytes(n_, k_, dtype_of<T>(), false)) {
    pack(executor, {{{rows.data(), dtype_of<T>(), n, k}}, k, packed.data(), dtype_of<T>(), false});
  }
};

template <class T>
std::vector<T> run_linear(const Runtime& runtime, const Weight<T>& w, const std::vector<T>& x,
                          int64_t rows) {
  std::vector<T> out(size_t(rows * w.n));
  linear(runtime, dtype_of<T>(),
         {rows, w.n, w.k, x.data(), const_cast<Weight<T>&>(w).packed.data(), nullptr, nullptr,
          out.data(), false});
  return out;
}

template <class T>
void check_product(const Context& context, int64_t n, int64_t k) {
  Random random(uint64_t(n * 1000 + k));
  Weight<T> w(random, n, k, *context.executors[0]);
  const int64_t rows = 9;
  std::vector<T> x = random_values<T>(random, rows * k);
  std::vector<float> bias = random_values<float>(random, n);
  std::vector<float> residual = random_values<float>(random, rows * n), out = residual;
  linear(context.runtime(1), dtype_of<T>(),
         {rows, n, k, x.data(), w.packed.data(), bias.data(), out.data(), out.data(), true});
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < n; c++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < k; i++) {
        double term = double(widen(x[size_t(r * k + i)])) * widen(w.rows[size_t(c * k + i)]);
        sum += term;
        size += std::abs(term);
      }
      sum += double(bias[size_t(c)]) + residual[size_t(r * n + c)];
      CHECK_NEAR(out[size_t(r * n + c)], sum, 1e-5 * (size + 1));
    }
  }
}

TEST(linear_agrees_with_double_precision_at_awkward_sizes) {
  for (auto [n, k] : {std::pair{64, 64}, {1, 2}, {33, 31}, {100, 57}, {95, 130}, {31, 1}}) {
    check_product<bf16>(context, n, k);
    check_product<float>(context, n, k);
  }
}

TEST(a_linear_scales_the_product_and_its_bias_but_not_the_residual) {
  Random random(9);
  const int64_t rows = 3, n = 45, k = 20;
  Weight<float> w(random, n, k, *context.executors[0]);
  std::vector<float> x = random_values<float>(random, rows * k);
  std::vector<float> bias = random_values<float>(random, n);
  std::vector<float> residual = random_values<float>(random, rows * n);
  std::vector<float> plain(size_t(rows * n)), scaled(size_t(rows * n));
  LinearTask task{rows, n, k, x.data(), w.packed.data(), bias.data(), nullptr, plain.data(), true};
  linear(context.runtime(), DType::kF32, task);
  task.residual = residual.data();
  task.out = scaled.data();
  task.scale = 0.22f;
  linear(context.runtime(1), DType::kF32, task);
  for (size_t i = 0; i < plain.size(); i++) CHECK(scaled[i] == plain[i] * 0.22f + residual[i]);
}

// Negative control: a reduction split by the number of rows, as some libraries do, must change
// bits.
TEST(a_reduction_split_by_the_number_of_rows_is_detected) {
  Random random(8);
  const int64_t k = 150;
  auto sum_in_parts = [&](const std::vector<float>& x, const std::vector<float>& w, int64_t parts) {
    float total = 0;
    for (int64_t p = 0; p < parts; p++) {
      float sum = 0;
      for (int64_t i = p * k / parts; i < (p + 1) * k / parts; i++) {
        sum += x[size_t(i)] * w[size_t(i)];
      }
      total += sum;
    }
    return total;
  };
  std::vector<float> whole, split;
  for (int row = 0; row < 16; row++) {
    std::vector<float> x = random_values<float>(random, k), w = random_values<float>(random, k);
    whole.push_back(sum_in_parts(x, w, 1));
    split.push_back(sum_in_parts(x, w, 3));
  }
  CHECK(!same_bits(whole.data(), split.data(), 16));
}

// Longer than what stays in the second level of cache: tables of tiles divide it along K.
TEST(a_linear_of_many_inputs_does_not_depend_on_its_batch) {
  Random random(21);
  const int64_t rows = 100, n = 300, k = 5603;
  Weight<bf16> w(random, n, k, *context.executors[0]);
  std::vector<bf16> x = random_values<bf16>(random, rows * k);
  std::vector<bf16> together = run_linear(context.runtime(0), w, x, rows);
  for (size_t threads : {1, 2}) {
    std::vector<bf16> again = run_linear(context.runtime(threads), w, x, rows);
    CHECK(same_bits(again.data(), together.data(), rows * n));
  }
  for (int64_t row : {0, 31, 99}) {
    std::vector<bf16> one(x.begin() + row * k, x.begin() + (row + 1) * k);
    std::vector<bf16> alone = run_linear(context.runtime(), w, one, 1);
    CHECK(same_bits(alone.data(), together.data() + row * n, n));
  }
}

// An even and an odd chain over each 32 elements of K, and their sum added to the total.
float product_by_tiles(const bf16* x, const bf16* w, int64_t k) {
  float total = 0;
  for (int64_t begin = 0; begin < k; begin += 32) {
    float chains[2] = {0, 0};
    for (int64_t i = begin; i < std::min(begin + 32, k); i++) {
      chains[i % 2] = std::fmaf(widen(x[i]), widen(w[i]), chains[i % 2]);
    }
    total += chains[0] + chains[1];
  }
  return total;
}

TEST(a_product_by_tiles_is_its_definition) {
  if (!has_tiles(context.kernels.isa)) return;
  Random random(23);
  for (auto [n, k] : {std::pair{40, 96}, {33, 71}, {5, 1}}) {
    Weight<bf16> w(random, n, k, *context.executors[0]);
    const int64_t rows = 18;
    std::vector<bf16> x = random_values<bf16>(random, rows * k);
    std::vector<float> out(size_t(rows * n));
    linear(context.runtime(), DType::kBf16,
           {rows, n, k, x.data(), w.packed.data(), nullptr, nullptr, out.data(), true});
    for (int64_t i = 0; i < rows * n; i++) {
      CHECK(out[size_t(i)] == product_by_tiles(&x[size_t(i / n * k)], &w.rows[size_t(i % n * k)], k));
    }
  }
}

// The tests of a machine without AMX are of the model; this one shows that the CPU does the same.
TEST(tile_instructions_and_their_model_agree_bit_for_bit) {
  if (std::string(context.kernels.isa) != "amx") {
    std::fprintf(stderr, "%s has no tile instructions to compare with\n", context.kernels.isa);
    return;
  }
  Random random(22);
  const Runtime model{kernels_for("amx_emulated"), context.runtime().integer,
                      *context.executors[1]};
  for (auto [n, k] : {std::pair{96, 576}, {33, 31}, {70, 1}, {300, 1531}}) {
    Weight<bf16> w(random, n, k, *context.executors[0]);
    for (int64_t rows : batch_sizes(context.quick, 257)) {
      std::vector<bf16> x = random_values<bf16>(random, rows * k);
      // Values of all sizes; products of some are denormal.
      for (bf16& value : x) set(value, std::ldexp(widen(value), random.below(160) - 130));
      const std::vector<bf16> found = run_linear(context.runtime(1), w, x, rows);
      CHECK(same_bits(found.data(), run_linear(model, w, x, rows).data(), rows * n));
    }
  }
}

template <class T>
void check_poison(const Context& context) {
  Random random(9);
  const int64_t n = 40, k = 34;
  Weight<T> w(random, n, k, *context.executors[0]);
  for (int64_t rows : {2, 7, 15, 30}) {
    std::vector<T> x = random_values<T>(random, rows * k);
    std::vector<T> clean = run_linear(context.runtime(1), w, x, rows);
    for (float poison : {kNaN, kInf, -kInf, 3e38f, 1e-40f}) {
      std::vector<T> bad = x;
      for (int64_t i = 0; i < k; i++) set(bad[size_t(k + i)], poison);
      std::vector<T> out = run_linear(context.runtime(1), w, bad, rows);
      CHECK(same_bits(out.data(), clean.data(), n));
      CHECK(same_bits(out.data() + 2 * n, clean.data() + 2 * n, (rows - 2) * n));
      if (poison != poison) CHECK(std::isnan(widen(out[size_t(n)])));
    }
  }
}

TEST(nan_inf_huge_and_denormal_values_do_not_leave_their_row_in_linear) {
  check_poison<bf16>(context);
  check_poison<float>(context);
}

double activate(Activation activation, double x) {
  if (activation == Activation::kClampedSwiglu) {
    x = std::min(x, 7.0);
    return x / (1 + std::exp(-1.702 * x));
  }
  if (activation == Activation::kSilu) return x / (1 + std::exp(-x));
  if (activation == Activation::kGelu) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

template <class T>
void check_gated(const Context& context, Activation activation, int64_t f, int64_t k) {
  Random random(uint64_t(f + k));
  std::vector<T> gate = random_values<T>(random, f * k, 0.3f);
  std::vector<T> up = random_values<T>(random, f * k, 0.3f);
  Aligned packed(packed_bytes(f, k, dtype_of<T>(), true));
  pack(*context.executors[1],
       {{{gate.data(), dtype_of<T>(), f, k}, {up.data(), dtype_of<T>(), f, k}},
        k,
        packed.data(),
        dtype_of<T>(),
        true});
  std::vector<float> bias = random_values<float>(random, 2 * f);
  const int64_t rows = 17;
  std::vector<T> x = random_values<T>(random, rows * k);
  std::vector<T> out(static_cast<size_t>(rows * f)), one(static_cast<size_t>(f));
  gated_linear(context.runtime(2), dtype_of<T>(),
               {rows, f, k, x.data(), packed.data(), bias.data(), activation, out.data()});
  for (int64_t r = 0; r < rows; r++) {
    gated_linear(context.runtime(0), dtype_of<T>(),
                 {1, f, k, x.data() + r * k, packed.data(), bias.data(), activation, one.data()});
    CHECK(same_bits(one.data(), out.data() + r * f, f));
    for (int64_t c = 0; c < f; c++) {
      double g = bias[size_t(c)], u = bias[size_t(f + c)];
      for (int64_t i = 0; i < k; i++) {
        g += double(widen(x[size_t(r * k + i)])) * widen(gate[size_t(c * k + i)]);
        u += double(widen(x[size_t(r * k + i)])) * widen(up[size_t(c * k + i)]);
      }
      if (activation == Activation::kClampedSwiglu) u = 1 + std::clamp(u, -7.0, 7.0);
      double expected = activate(activation, g) * u;
      CHECK_NEAR(widen(out[size_t(r * f + c)]), expected,
                 kEpsilon<T> * std::abs(expected) + 2e-5 * (1 + std::abs(u)));
    }
  }
}

TEST(gated_linear_agrees_with_double_precision_and_with_batches_of_one) {
  for (Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu,
                                Activation::kClampedSwiglu}) {
    for (auto [f, k] : {std::pair{48, 32}, {37, 45}}) {
      check_gated<bf16>(context, activation, f, k);
      check_gated<float>(context, activation, f, k);
    }
  }
}

TEST(pack_concatenates_strided_sources_of_every_type_and_zeros_the_padding) {
  Random random(3);
  const int64_t k = 37, stride = 50;
  std::vector<uint16_t> halves(size_t(20 * stride), 0x3e00);  // 1.5 in f16
  std::vector<float> floats = random_values<float>(random, 25 * stride);
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    Aligned packed(packed_bytes(45, k, dtype, false));
    pack(*context.executors[1],
         {{{halves.data(), DType::kF16, 20, stride}, {floats.data(), DType::kF32, 25, stride}},
          k,
          packed.data(),
          dtype,
          false});
    std::vector<float> column(static_cast<size_t>(k));
    for (int64_t c = 0; c < 64; c++) {
      unpack_column(packed.data(), dtype, k, c, column.data());
      for (int64_t i = 0; i < k; i++) {
        float expected = c < 20 ? 1.5f : c < 45 ? floats[size_t((c - 20) * stride + i)] : 0.0f;
        if (dtype == DType::kBf16) {
          bf16 rounded;
          set(rounded, expected);
          expected = widen(rounded);
        }
        CHECK(column[size_t(i)] == expected);
      }
    }
  }
}

}  // namespace
}  // namespace cadenza::tests
