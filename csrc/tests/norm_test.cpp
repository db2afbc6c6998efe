// Norms, embedding, row gather, and the pool with concurrent callers.
#include <atomic>
#include <thread>

#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {
namespace {

template <class T>
void check_norm(const Context& context, int64_t width) {
  Random random(static_cast<uint64_t>(width));
  const int64_t rows = 41;
  std::vector<float> x = random_values<float>(random, rows * width, 3);
  std::vector<float> weight = random_values<float>(random, width);
  std::vector<T> out(static_cast<size_t>(rows * width)), one(static_cast<size_t>(width));
  NormTask task{rows, width, x.data(), weight.data(), 1e-5f, nullptr, out.data(), false};
  rms_norm(context.runtime(1), dtype_of<T>(), task);
  for (int32_t r = 0; r < rows; r++) {
    NormTask alone = task;
    alone.rows = 1;
    alone.x = x.data() + r * width;
    alone.out = one.data();
    rms_norm(context.runtime(0), dtype_of<T>(), alone);
    CHECK(same_bits(one.data(), out.data() + r * width, width));
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += std::pow(double(x[size_t(r * width + i)]), 2);
    for (int64_t i = 0; i < width; i++) {
      double expected =
          x[size_t(r * width + i)] / std::sqrt(squares / double(width) + 1e-5) * weight[size_t(i)];
      CHECK_NEAR(widen(out[size_t(r * width + i)]), expected,
                 (kEpsilon<T> + 1e-6) * std::abs(expected) + 1e-30);
    }
  }
}

TEST(rms_norm_agrees_with_double_precision_at_every_width) {
  for (int64_t width : {1, 15, 16, 17, 64, 65, 100, 576}) {
    check_norm<bf16>(context, width);
    check_norm<float>(context, width);
  }
}

TEST(rms_norm_adds_its_residual_in_place) {
  Random random(4);
  const int64_t rows = 5, width = 33;
  std::vector<float> x = random_values<float>(random, rows * width);
  std::vector<float> weight = random_values<float>(random, width);
  std::vector<float> plain(static_cast<size_t>(rows * width)),
      sum = random_values<float>(random, rows * width);
  std::vector<float> residual = sum;
  NormTask task{rows, width, x.data(), weight.data(), 1e-5f, nullptr, plain.data(), true};
  rms_norm(context.runtime(), DType::kBf16, task);
  task.residual = sum.data();
  task.out = sum.data();
  rms_norm(context.runtime(1), DType::kBf16, task);
  for (size_t i = 0; i < sum.size(); i++) CHECK(sum[i] == plain[i] + residual[i]);
}

TEST(rms_norm_multiplies_the_sum_by_its_factor) {
  Random random(5);
  const int64_t rows = 5, width = 33;
  std::vector<float> x = random_values<float>(random, rows * width);
  std::vector<float> weight = random_values<float>(random, width);
  std::vector<float> residual = random_values<float>(random, rows * width);
  std::vector<float> sum(residual.size()), product(residual.size());
  NormTask task{rows, width, x.data(), weight.data(), 1e-5f, residual.data(), sum.data(), true};
  rms_norm(context.runtime(), DType::kBf16, task);
  const float factor = 0.3f;
  task.factor = &factor;
  task.out = product.data();
  rms_norm(context.runtime(1), DType::kBf16, task);
  for (size_t i = 0; i < sum.size(); i++) CHECK(product[i] == sum[i] * factor);
}

template <class T>
void check_gate(const Context& context, int64_t width) {
  Random random(static_cast<uint64_t>(width));
  const int64_t rows = 19, layers = 3, first = width;
  std::vector<float> x = random_values<float>(random, rows * width, 3);
  std::vector<float> inputs = random_values<float>(random, rows * layers * width);
  std::vector<T> out(size_t(rows * width));
  GateTask task{rows,          width,     layers * width,        first,
                x.data(),      inputs.data(), Activation::kGeluTanh, out.data()};
  gate_inputs(context.runtime(), dtype_of<T>(), task);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < width; i++) {
      double v = x[size_t(r * width + i)];
      double inner = std::sqrt(2 / 3.14159265358979) * (v + 0.044715 * v * v * v);
      double expected = v / 2 * (1 + std::tanh(inner)) * inputs[size_t(r * layers * width + first + i)];
      CHECK_NEAR(widen(out[size_t(r * width + i)]), expected,
                 (kEpsilon<T> + 1e-6) * std::abs(expected) + 1e-6);
    }
  }
}

TEST(gate_inputs_agrees_with_double_precision) {
  for (int64_t width : {1, 24, 256}) {
    check_gate<bf16>(context, width);
    check_gate<float>(context, width);
  }
}

TEST(take_rows_copies_rows_and_zeros_those_with_an_invalid_index) {
  Random random(6);
  const int64_t width = 33, sources = 7;
  std::vector<float> x = random_values<float>(random, sources * width);
  std::vector<int32_t> indices{6, 0, 3, 3, -1, 7, 0x7fffffff, 5};
  std::vector<float> out(indices.size() * size_t(width) + 1, 9.0f);
  take_rows({int64_t(indices.size()), width * int64_t(sizeof(float)), sources, x.data(),
             indices.data(), out.data()});
  const std::vector<float> nothing(size_t(width), 0.0f);
  for (size_t r = 0; r < indices.size(); r++) {
    bool known = indices[r] >= 0 && indices[r] < sources;
    const float* expected = known ? x.data() + indices[r] * width : nothing.data();
    CHECK(same_bits(out.data() + r * size_t(width), expected, width));
  }
  CHECK(out.back() == 9.0f);
}

template <class T>
void check_embed(const Context& context) {
  Random random(5);
  const int64_t vocab = 77, width = 45;
  std::vector<T> table = random_values<T>(random, vocab * width);
  Aligned packed(packed_bytes(vocab, width, dtype_of<T>(), false));
  pack(*context.executors[0],
       {{{table.data(), dtype_of<T>(), vocab, width}}, width, packed.data(), dtype_of<T>(), false});
  std::vector<int32_t> ids{0, 76, 31, 32, 33, -1, 77, 5};
  std::vector<float> from_packed(ids.size() * width), from_plain(ids.size() * width);
  embed(context.runtime(1), format_of(dtype_of<T>()),
        {8, width, vocab, ids.data(), packed.data(), true, 2.5f, from_packed.data()});
  embed(context.runtime(0), format_of(dtype_of<T>()),
        {8, width, vocab, ids.data(), table.data(), false, 2.5f, from_plain.data()});
  CHECK(same_bits(from_packed.data(), from_plain.data(), int64_t(from_plain.size())));
  for (size_t r = 0; r < ids.size(); r++) {
    bool known = ids[r] >= 0 && ids[r] < vocab;
    for (int64_t i = 0; i < width; i++) {
      float expected = known ? widen(table[size_t(ids[r] * width + i)]) * 2.5f : 0.0f;
      CHECK(from_plain[r * size_t(width) + size_t(i)] == expected);
    }
  }
}

TEST(embed_gives_the_same_bits_from_a_packed_and_from_a_plain_table) {
  check_embed<bf16>(context);
  check_embed<float>(context);
}

TEST(a_pool_runs_every_unit_once_even_with_concurrent_callers) {
  struct Counts {
    std::atomic<int> unit[1000];
  };
  auto run_many = [&] {
    for (int i = 0; i < 200; i++) {
      auto counts = std::make_unique<Counts>();
      UnitFn body = [](const void* all, int64_t begin, int64_t end, Worker&) {
        auto* mine = static_cast<Counts*>(const_cast<void*>(all));
        for (int64_t u = begin; u < end; u++) mine->unit[u].fetch_add(1);
      };
      Executor::Lease lease(*context.executors[2]);
      lease.run({body, counts.get(), 1000, 7}, true);
      for (auto& count : counts->unit) CHECK(count.load() == 1);
    }
  };
  std::thread other(run_many);
  run_many();
  other.join();
}

// XLA's threads may flush denormals or not; the operations set the mode themselves.
TEST(results_do_not_depend_on_the_callers_denormal_mode) {
  const int64_t width = 64;
  std::vector<float> x(width, 1e-39f), weight(width, 1e19f), first(width), second(width);
  NormTask task{1, width, x.data(), weight.data(), 1e-30f, nullptr, first.data(), true};
  rms_norm(context.runtime(), DType::kF32, task);
  uint64_t saved = enter_float_state();
  task.out = second.data();
  rms_norm(context.runtime(), DType::kF32, task);
  leave_float_state(saved);
  CHECK(same_bits(first.data(), second.data(), width));
}

}  // namespace
}  // namespace cadenza::tests
