// Mixture of experts: compared with double precision, and bitwise independence of a row from its
// batch.
#include <algorithm>
#include <numeric>

#include "tests/exactness.h"

namespace cadenza::tests {
namespace {

// X experts, C chosen by each row, E hidden size, F intermediate size.
struct Shape {
  int64_t experts, chosen, hidden, inner;
};
constexpr Shape kShape{5, 3, 37, 21};
constexpr Shape kWide{9, 4, 70, 45};

// The packed weights of every expert, one after another.
template <class T>
struct Experts {
  int64_t count, n, k;
  bool gated;
  std::vector<T> rows;  // [X, n, k], or gate and up: [X, 2, n, k]
  Aligned packed;

  Experts(Random& random, int64_t count_, int64_t n_, int64_t k_, bool gated_, Executor& executor)
      : count(count_),
        n(n_),
        k(k_),
        gated(gated_),
        rows(random_values<T>(random, count_ * n_ * k_ * (gated_ ? 2 : 1), 0.3f)),
        packed(count_ * bytes()) {
    for (int64_t x = 0; x < count; x++) {
      PackTask task{{}, k, at(x), dtype_of<T>(), gated};
      for (int part = 0; part < parts(); part++) {
        task.sources.push_back({row(x, part, 0), dtype_of<T>(), n, k});
      }
      pack(executor, task);
    }
  }

  int parts() const { return gated ? 2 : 1; }
  int64_t bytes() const { return packed_bytes(n, k, dtype_of<T>(), gated); }
  uint8_t* at(int64_t x) { return static_cast<uint8_t*>(packed.data()) + x * bytes(); }
  const T* row(int64_t x, int part, int64_t column) const {
    return rows.data() + ((x * parts() + part) * n + column) * k;
  }
  double dot(int64_t x, int part, int64_t column, const double* v) const {
    double sum = 0;
    for (int64_t i = 0; i < k; i++) sum += v[i] * widen(row(x, part, column)[i]);
    return sum;
  }
};

// The weights of one mixture-of-experts layer.
template <class T>
struct Layer {
  Shape shape;
  Experts<T> router, gate_up, down;
  std::vector<float> inner_bias, bias;

  Layer(Random& random, const Shape& s, Executor& executor)
      : shape(s),
        router(random, 1, s.experts, s.hidden, false, executor),
        gate_up(random, s.experts, s.inner, s.hidden, true, executor),
        down(random, s.experts, s.hidden, s.inner, false, executor),
        inner_bias(random_values<float>(random, s.experts * 2 * s.inner)),
        bias(random_values<float>(random, s.experts * s.hidden)) {}
};

template <class T>
struct Result {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<T> inner;    // [rows, C, F]
  std::vector<float> out;  // [rows, E]
};

struct Weighting {
  bool over_chosen;
  float scale;
  bool sigmoid = false;
};
constexpr Weighting kPlainWeights{false, 1.0f};

template <class T>
void route(const Runtime& runtime, Layer<T>& layer, const T* x, int64_t rows, Weighting weighting,
           Result<T>& result) {
  const Shape& s = layer.shape;
  RouteTask task{};
  task.product.rows = rows;
  task.product.n = s.experts;
  task.product.k = s.hidden;
  task.product.x = x;
  task.product.w = layer.router.packed.data();
  task.num_chosen = s.chosen;
  task.over_chosen = weighting.over_chosen;
  task.sigmoid = weighting.sigmoid;
  task.scale = weighting.scale;
  task.ids = result.ids.data();
  task.weights = result.weights.data();
  route_experts(runtime, dtype_of<T>(), task);
}

// Runs both grouped products for `result.ids`; `result.out` holds the residual and is updated in
// place.
template <class T>
void apply(const Runtime& runtime, Layer<T>& layer, const T* x, int64_t rows, Result<T>& result) {
  const Shape& s = layer.shape;
  const ExpertChoice choice{s.experts, s.chosen, result.ids.data()};
  GatedTask gated{rows,
                  s.inner,
                  s.hidden,
                  x,
                  layer.gate_up.packed.data(),
                  layer.inner_bias.data(),
                  Activation::kSilu,
                  result.inner.data()};
  grouped_gated_linear(runtime, dtype_of<T>(), {gated, choice});
  LinearTask down{rows,
                  s.hidden,
                  s.inner,
                  result.inner.data(),
                  layer.down.packed.data(),
                  layer.bias.data(),
                  result.out.data(),
                  result.out.data(),
                  true};
  grouped_linear(runtime, dtype_of<T>(), {down, choice, result.weights.data()});
}

template <class T>
Result<T> empty_result(const Shape& s, const float* residual, int64_t rows) {
  Result<T> result;
  result.ids.assign(size_t(rows * s.chosen), -7);
  result.weights.assign(size_t(rows * s.chosen), -7);
  result.inner.resize(size_t(rows * s.chosen * s.inner));
  result.out.assign(residual, residual + rows * s.hidden);
  return result;
}

template <class T>
Result<T> run_layer(const Runtime& runtime, Layer<T>& layer, const T* x, const float* residual,
                    int64_t rows) {
  Result<T> result = empty_result<T>(layer.shape, residual, rows);
  route(runtime, layer, x, rows, kPlainWeights, result);
  apply(runtime, layer, x, rows, result);
  return result;
}

template <class T>
bool same_rows(const Shape& s, const Result<T>& a, int64_t at_a, const Result<T>& b, int64_t at_b,
               int64_t rows) {
  const int64_t c = s.chosen, inner = c * s.inner;
  return same_bits(a.ids.data() + at_a * c, b.ids.data() + at_b * c, rows * c) &&
         same_bits(a.weights.data() + at_a * c, b.weights.data() + at_b * c, rows * c) &&
         same_bits(a.inner.data() + at_a * inner, b.inner.data() + at_b * inner, rows * inner) &&
         same_bits(a.out.data() + at_a * s.hidden, b.out.data() + at_b * s.hidden, rows * s.hidden);
}

// Checks routing, both grouped products and the sum over slots as one operation.
template <class T>
void check_rows(const Context& context, const Shape& shape) {
  Random random(31);
  Layer<T> layer(random, shape, *context.executors[0]);
  const int most = context.quick ? 129 : 513;
  std::vector<T> x = random_values<T>(random, most * shape.hidden);
  std::vector<float> residual = random_values<float>(random, most * shape.hidden);
  const int64_t pair_bytes = 8 + shape.inner * int64_t(sizeof(T));
  RowOperation op{"experts", shape.chosen * pair_bytes + shape.hidden * 4, most, nullptr};
  op.run = [&](const RowBatch& batch) {
    const int64_t rows = int64_t(batch.rows.size());
    std::vector<T> taken = take_rows(batch, x, shape.hidden);
    std::vector<float> onto = take_rows(batch, residual, shape.hidden);
    Result<T> all =
        run_layer(context.runtime(batch.threads), layer, taken.data(), onto.data(), rows);
    std::vector<uint8_t> bytes;
    auto append = [&](const auto& values, int64_t row, int64_t width) {
      auto from = values.begin() + row * width;
      std::vector<uint8_t> part = bytes_of(std::vector(from, from + width));
      bytes.insert(bytes.end(), part.begin(), part.end());
    };
    for (int64_t row = 0; row < rows; row++) {
      append(all.ids, row, shape.chosen);
      append(all.weights, row, shape.chosen);
      append(all.inner, row, shape.chosen * shape.inner);
      append(all.out, row, shape.hidden);
    }
    return bytes;
  };
  check_exact(context, op);
}

TEST(experts_give_a_row_the_same_bits_in_every_batch_position_and_thread_count) {
  for (const Shape& shape : {kShape, kWide}) {
    check_rows<bf16>(context, shape);
    check_rows<float>(context, shape);
  }
}

// Large enough to run on all threads, with claims of several panels.
template <class T>
void check_with_other_rows(const Context& context) {
  const Shape shape{6, 2, 130, 96};
  Random random(32);
  Layer<T> layer(random, shape, *context.executors[0]);
  const int64_t rows = 33;
  std::vector<T> x = random_values<T>(random, rows * shape.hidden);
  std::vector<float> residual = random_values<float>(random, rows * shape.hidden);
  Result<T> alone = empty_result<T>(shape, residual.data(), 1);
  alone.ids = {4, 1};
  alone.weights = {0.75f, 0.5f};
  apply(context.runtime(0), layer, x.data(), 1, alone);
  for (size_t threads = 0; threads < 3; threads++) {
    // -1: the other rows have no expert; the number of experts: each pair has another one.
    for (int others = -1; others <= int(shape.experts); others++) {
      Result<T> all = empty_result<T>(shape, residual.data(), rows);
      std::fill(all.ids.begin(), all.ids.end(), others);
      if (others == int(shape.experts)) {
        for (size_t i = 0; i < all.ids.size(); i++) all.ids[i] = int32_t(i) % others;
      }
      std::fill(all.weights.begin(), all.weights.end(), 0.5f);
      std::copy(alone.ids.begin(), alone.ids.end(), all.ids.begin());
      std::copy(alone.weights.begin(), alone.weights.end(), all.weights.begin());
      apply(context.runtime(threads), layer, x.data(), rows, all);
      CHECK(same_rows(shape, all, 0, alone, 0, 1));
      if (others >= 0) continue;
      CHECK(same_bits(all.out.data() + shape.hidden, residual.data() + shape.hidden,
                      (rows - 1) * shape.hidden));
    }
  }
}

TEST(an_experts_output_for_a_row_does_not_depend_on_its_other_rows) {
  check_with_other_rows<bf16>(context);
  check_with_other_rows<float>(context);
}

// The partial results of so many rows are those of several blocks of panels.
template <class T>
void check_blocks(const Context& context) {
  const Shape shape{9, 4, 300, 17};
  Random random(40);
  Layer<T> layer(random, shape, *context.executors[0]);
  const int64_t rows = 513;
  std::vector<T> x = random_values<T>(random, rows * shape.hidden);
  std::vector<float> residual = random_values<float>(random, rows * shape.hidden);
  for (size_t threads = 0; threads < 3; threads++) {
    Result<T> all = run_layer(context.runtime(threads), layer, x.data(), residual.data(), rows);
    for (int64_t row : {int64_t(0), rows / 2, rows - 1}) {
      Result<T> alone = run_layer(context.runtime(0), layer, x.data() + row * shape.hidden,
                                  residual.data() + row * shape.hidden, 1);
      CHECK(same_rows(shape, all, row, alone, 0, 1));
    }
  }
}

TEST(experts_of_so_many_rows_that_their_sums_are_taken_in_blocks_give_each_row_its_own_bits) {
  check_blocks<bf16>(context);
  check_blocks<float>(context);
}

// Negative control: summing a row's slots in another order, such as the order of the experts in the
// batch, must change bits.
TEST(a_different_order_of_the_sum_over_slots_is_detected) {
  const Shape shape = kWide;
  Random random(33);
  Layer<float> layer(random, shape, *context.executors[0]);
  const int64_t rows = 8;
  std::vector<float> x = random_values<float>(random, rows * shape.hidden);
  std::vector<float> residual = random_values<float>(random, rows * shape.hidden);
  Result<float> forwards = run_layer(context.runtime(), layer, x.data(), residual.data(), rows);
  Result<float> backwards = empty_result<float>(shape, residual.data(), rows);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t s = 0; s < shape.chosen; s++) {
      int64_t from = row * shape.chosen + s, to = (row + 1) * shape.chosen - 1 - s;
      backwards.ids[size_t(to)] = forwards.ids[size_t(from)];
      backwards.weights[size_t(to)] = forwards.weights[size_t(from)];
    }
  }
  apply(context.runtime(), layer, x.data(), rows, backwards);
  CHECK(!same_bits(forwards.out.data(), backwards.out.data(), rows * shape.hidden));
  for (size_t i = 0; i < forwards.out.size(); i++) {
    CHECK_NEAR(forwards.out[i], backwards.out[i], 1e-5 * (1 + std::abs(forwards.out[i])));
  }
}

// Compares ids and weights with double precision.
template <class T>
void check_route(const Context& context, const Shape& shape, Weighting weighting) {
  Random random(34);
  Layer<T> layer(random, shape, *context.executors[1]);
  const int64_t rows = 50;
  std::vector<T> x = random_values<T>(random, rows * shape.hidden);
  std::vector<float> nothing(size_t(rows * shape.hidden));
  Result<T> result = empty_result<T>(shape, nothing.data(), rows);
  route(context.runtime(2), layer, x.data(), rows, weighting, result);
  for (int64_t row = 0; row < rows; row++) {
    std::vector<double> input(static_cast<size_t>(shape.hidden)), logits;
    for (int64_t i = 0; i < shape.hidden; i++) {
      input[size_t(i)] = widen(x[size_t(row * shape.hidden + i)]);
    }
    for (int64_t e = 0; e < shape.experts; e++) {
      logits.push_back(layer.router.dot(0, 0, e, input.data()));
    }
    std::vector<int32_t> order(static_cast<size_t>(shape.experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
    auto score = [&](int64_t s) {
      double logit = logits[size_t(order[size_t(s)])];
      return weighting.sigmoid ? 1.0 / (1.0 + std::exp(-logit)) : std::exp(logit);
    };
    double total = 0, chosen = 0;
    for (int64_t s = 0; s < shape.experts; s++) {
      double e = score(s);
      if (s < shape.chosen) chosen += e;
      total += e;
    }
    double divisor = weighting.over_chosen ? chosen : weighting.sigmoid ? 1.0 : total;
    for (int64_t s = 0; s < shape.chosen; s++) {
      size_t pair = size_t(row * shape.chosen + s);
      CHECK(result.ids[pair] == order[size_t(s)]);
      double expected = score(s) / divisor * weighting.scale;
      CHECK_NEAR(result.weights[pair], expected, 2e-5 * expected);
    }
  }
}

TEST(route_experts_agrees_with_double_precision_in_every_weighting) {
  for (const Shape& shape : {kShape, kWide, Shape{128, 8, 48, 8}, Shape{1, 1, 3, 1}}) {
    for (Weighting weighting :
         {kPlainWeights, {true, 1.0f}, {true, 2.5f}, {false, 1.5f, true}, {true, 1.0f, true}}) {
      check_route<bf16>(context, shape, weighting);
      check_route<float>(context, shape, weighting);
    }
  }
}

TEST(route_experts_gives_ties_to_the_lowest_id) {
  const Shape shape{19, 4, 2, 1};
  Random random(35);
  Layer<float> layer(random, shape, *context.executors[0]);
  std::vector<float> w(size_t(2 * shape.experts));
  for (int64_t e = 0; e < shape.experts; e++) {  // logits 0 -0 0 -0 ... but 1 for ids 7 and 18
    w[size_t(2 * e)] = e == 7 || e == 18 ? 1.0f : e % 2 == 0 ? 0.0f : -0.0f;
  }
  pack(*context.executors[0],
       {{{w.data(), DType::kF32, shape.experts, 2}}, 2, layer.router.at(0), DType::kF32, false});
  std::vector<float> x{1.0f, 0.0f}, nothing(2);
  Result<float> result = empty_result<float>(shape, nothing.data(), 1);
  route(context.runtime(), layer, x.data(), 1, kPlainWeights, result);
  CHECK((result.ids == std::vector<int32_t>{7, 18, 0, 1}));
}

TEST(a_biased_choice_is_among_the_groups_whose_two_best_have_the_largest_sums) {
  const Shape shape{8, 3, 2, 1};
  Random random(36);
  Layer<float> layer(random, shape, *context.executors[0]);
  // Logits of four groups of two; with the bias the sums of their two best are
  // 1.2, 1.3, 1.0 and 1.4 or so.
  const float logits[8] = {2.0f, -1.5f, 0.5f, 0.3f, -3.0f, 3.0f, 1.0f, -1.0f};
  const float bias[8] = {0.1f, 0.0f, 0.0f, 0.1f, 0.0f, 0.0f, 0.1f, 0.3f};
  std::vector<float> w(16, 0.0f), x{1.0f, 0.0f}, nothing(2);
  for (int e = 0; e < 8; e++) w[size_t(2 * e)] = logits[e];
  pack(*context.executors[0],
       {{{w.data(), DType::kF32, shape.experts, 2}}, 2, layer.router.at(0), DType::kF32, false});
  std::vector<double> scores, chances;
  for (int e = 0; e < 8; e++) {
    chances.push_back(1 / (1 + std::exp(-double(logits[e]))));
    scores.push_back(chances.back() + bias[e]);
  }
  Result<float> result = empty_result<float>(shape, nothing.data(), 1);
  RouteTask task{};
  task.product.rows = 1;
  task.product.n = shape.experts;
  task.product.k = 2;
  task.product.x = x.data();
  task.product.w = layer.router.packed.data();
  task.num_chosen = shape.chosen;
  task.over_chosen = task.sigmoid = true;
  task.choice = {bias, 4, 2};
  task.scale = 2.5f;
  task.least_sum = 0.25f;
  task.ids = result.ids.data();
  task.weights = result.weights.data();
  route_experts(context.runtime(), DType::kF32, task);
  CHECK(scores[6] + scores[7] > scores[2] + scores[3]);
  CHECK(scores[2] + scores[3] > scores[0] + scores[1]);
  CHECK((result.ids == std::vector<int32_t>{6, 3, 2}));  // without 0 and 5, the best of all
  const double total = chances[6] + chances[3] + chances[2] + 0.25;
  for (size_t s = 0; s < 3; s++) {
    double expected = chances[size_t(result.ids[s])] / total * 2.5;
    CHECK_NEAR(result.weights[s], expected, 1e-5);
  }
}

template <class T>
void check_layer(const Context& context, const Shape& shape) {
  Random random(36);
  Layer<T> layer(random, shape, *context.executors[1]);
  const int64_t rows = 23;
  std::vector<T> x = random_values<T>(random, rows * shape.hidden);
  std::vector<float> residual = random_values<float>(random, rows * shape.hidden);
  Result<T> result = run_layer(context.runtime(2), layer, x.data(), residual.data(), rows);
  for (int64_t row = 0; row < rows; row++) {
    std::vector<double> input(static_cast<size_t>(shape.hidden)), inner(size_t(shape.inner));
    std::vector<double> expected(residual.begin() + row * shape.hidden,
                                 residual.begin() + (row + 1) * shape.hidden);
    for (int64_t i = 0; i < shape.hidden; i++) {
      input[size_t(i)] = widen(x[size_t(row * shape.hidden + i)]);
    }
    for (int64_t pair = row * shape.chosen; pair < (row + 1) * shape.chosen; pair++) {
      int64_t e = result.ids[size_t(pair)];
      const float* bias = layer.inner_bias.data() + e * 2 * shape.inner;
      for (int64_t c = 0; c < shape.inner; c++) {
        double gate = layer.gate_up.dot(e, 0, c, input.data()) + bias[c];
        double up = layer.gate_up.dot(e, 1, c, input.data()) + bias[shape.inner + c];
        double wanted = gate / (1 + std::exp(-gate)) * up;
        inner[size_t(c)] = widen(result.inner[size_t(pair * shape.inner + c)]);
        CHECK_NEAR(inner[size_t(c)], wanted,
                   kEpsilon<T> * std::abs(wanted) + 2e-5 * (1 + std::abs(up)));
      }
      for (int64_t c = 0; c < shape.hidden; c++) {
        double y = layer.down.dot(e, 0, c, inner.data()) + layer.bias[size_t(e * shape.hidden + c)];
        expected[size_t(c)] += double(result.weights[size_t(pair)]) * y;
      }
    }
    for (int64_t c = 0; c < shape.hidden; c++) {
      CHECK_NEAR(result.out[size_t(row * shape.hidden + c)], expected[size_t(c)],
                 1e-4 * (1 + std::abs(expected[size_t(c)])));
    }
  }
}

TEST(grouped_products_agree_with_double_precision) {
  for (const Shape& shape : {kShape, kWide, Shape{3, 1, 1, 1}, Shape{4, 2, 64, 32}}) {
    check_layer<bf16>(context, shape);
    check_layer<float>(context, shape);
  }
}

template <class T>
void check_poison(const Context& context) {
  const Shape shape = kShape;
  Random random(37);
  Layer<T> layer(random, shape, *context.executors[0]);
  const int64_t rows = 15, width = shape.hidden;
  std::vector<T> x = random_values<T>(random, rows * width);
  std::vector<float> residual = random_values<float>(random, rows * width);
  Result<T> clean = run_layer(context.runtime(), layer, x.data(), residual.data(), rows);
  for (float poison : {kNaN, kInf, -kInf, 3e38f, 1e-40f}) {
    std::vector<T> bad = x;
    for (int64_t i = 0; i < width; i++) set(bad[size_t(4 * width + i)], poison);
    for (size_t threads = 0; threads < 3; threads++) {
      Result<T> result =
          run_layer(context.runtime(threads), layer, bad.data(), residual.data(), rows);
      CHECK(same_rows(shape, result, 0, clean, 0, 4));
      CHECK(same_rows(shape, result, 5, clean, 5, rows - 5));
      if (poison == poison) continue;
      for (int64_t s = 0; s < shape.chosen; s++) {
        CHECK(result.ids[size_t(4 * shape.chosen + s)] == s);
        CHECK(std::isnan(result.weights[size_t(4 * shape.chosen + s)]));
      }
      for (int64_t i = 0; i < width; i++) CHECK(std::isnan(result.out[size_t(4 * width + i)]));
    }
  }
}

TEST(nan_inf_huge_and_denormal_values_do_not_leave_their_row_in_experts) {
  check_poison<bf16>(context);
  check_poison<float>(context);
}

TEST(rows_beyond_the_true_count_are_neither_read_nor_written) {
  const Shape shape = kShape;
  Random random(39);
  Layer<bf16> layer(random, shape, *context.executors[0]);
  const int64_t padded = 20, rows = 7, width = shape.hidden;
  std::vector<bf16> x = random_values<bf16>(random, padded * width);
  for (int64_t i = rows * width; i < padded * width; i++) set(x[size_t(i)], kNaN);
  std::vector<float> residual = random_values<float>(random, padded * width);
  Result<bf16> untouched = empty_result<bf16>(shape, residual.data(), padded), result = untouched;
  route(context.runtime(2), layer, x.data(), rows, kPlainWeights, result);
  apply(context.runtime(2), layer, x.data(), rows, result);
  CHECK(same_rows(shape, result, rows, untouched, rows, padded - rows));
  for (float value : result.weights) CHECK(value == value);
  for (float value : result.out) CHECK(value == value);
}

TEST(an_expert_chosen_by_every_row_equals_the_dense_product_bitwise) {
  Random random(38);
  const int64_t rows = 31, n = 50, k = 45;
  Experts<bf16> down(random, 3, n, k, false, *context.executors[0]);
  std::vector<bf16> x = random_values<bf16>(random, rows * k), one(size_t(rows * n)), two = one;
  std::vector<int32_t> ids(static_cast<size_t>(rows), 2);
  std::vector<float> weights(static_cast<size_t>(rows), 1.0f);
  LinearTask dense{rows, n, k, x.data(), down.at(2), nullptr, nullptr, one.data(), false};
  linear(context.runtime(0), DType::kBf16, dense);
  LinearTask grouped = dense;
  grouped.w = down.packed.data();
  grouped.out = two.data();
  const ExpertChoice choice{3, 1, ids.data()};
  grouped_linear(context.runtime(2), DType::kBf16, {grouped, choice, weights.data()});
  CHECK(same_bits(one.data(), two.data(), rows * n));
  CHECK(count_active_experts(choice, rows) == 1);
}

}  // namespace
}  // namespace cadenza::tests
