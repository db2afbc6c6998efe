// Rows do not depend on their batch: every row-wise operation, and negative controls.
#include "tests/exactness.h"

#include "tests/next_token.h"

namespace cadenza::tests {
namespace {

constexpr int kRows = 513;

template <class T>
struct Product {
  static constexpr int64_t n = 77;
  const int64_t k;
  const int most_rows;
  std::vector<T> x;
  std::vector<float> bias, residual;
  Aligned packed{packed_bytes(n, k, dtype_of<T>(), false)};

  Product(const Context& context, int64_t k_, int most_rows_) : k(k_), most_rows(most_rows_) {
    Random random(41);
    std::vector<T> rows = random_values<T>(random, n * k, 0.1f);
    pack(*context.executors[0],
         {{{rows.data(), dtype_of<T>(), n, k}}, k, packed.data(), dtype_of<T>(), false});
    x = random_values<T>(random, most_rows * k);
    bias = random_values<float>(random, n);
    residual = random_values<float>(random, most_rows * n);
  }

  // Output in the activation type.
  RowOperation plain(const Context& context) {
    return {"linear", n * int64_t(sizeof(T)), most_rows, [&context, this](const RowBatch& batch) {
              std::vector<T> taken = take_rows(batch, x, k), out(batch.rows.size() * n);
              linear(context.runtime(batch.threads), dtype_of<T>(),
                     {int64_t(batch.rows.size()), n, k, taken.data(), packed.data(), nullptr,
                      nullptr, out.data(), false});
              return bytes_of(out);
            }};
  }
  // Scale, bias and a residual that aliases the output.
  RowOperation added(const Context& context) {
    return {"linear with a residual", n * 4, most_rows, [&context, this](const RowBatch& batch) {
              std::vector<T> taken = take_rows(batch, x, k);
              std::vector<float> out = take_rows(batch, residual, n);
              linear(context.runtime(batch.threads), dtype_of<T>(),
                     {int64_t(batch.rows.size()), n, k, taken.data(), packed.data(), bias.data(),
                      out.data(), out.data(), true, 0.3f});
              return bytes_of(out);
            }};
  }
};

template <class T>
void check_product(const Context& context, int64_t k, int most_rows) {
  Product<T> product(context, k, most_rows);
  check_exact(context, product.plain(context));
  check_exact(context, product.added(context));
}

// An odd K: a bf16 row's last, incomplete pair is followed by the next row's first element.
TEST(a_linear_row_does_not_depend_on_its_batch) {
  check_product<bf16>(context, 151, kRows);
  check_product<float>(context, 151, kRows);
}

// Rows of 4096 bytes, and of 8192.
TEST(a_linear_row_that_is_copied_apart_from_others_does_not_depend_on_its_batch) {
  check_product<bf16>(context, 2048, 65);
  check_product<float>(context, 2048, 65);
}

template <class T>
void check_gated(const Context& context, Activation activation) {
  constexpr int64_t f = 45, k = 95;
  Random random(42);
  Aligned packed(packed_bytes(f, k, dtype_of<T>(), true));
  std::vector<T> gate = random_values<T>(random, f * k, 0.3f);
  std::vector<T> up = random_values<T>(random, f * k, 0.3f);
  pack(*context.executors[0],
       {{{gate.data(), dtype_of<T>(), f, k}, {up.data(), dtype_of<T>(), f, k}},
        k,
        packed.data(),
        dtype_of<T>(),
        true});
  std::vector<T> x = random_values<T>(random, kRows * k);
  std::vector<float> bias = random_values<float>(random, 2 * f);
  check_exact(context, {"gated_linear", f * int64_t(sizeof(T)), kRows, [&](const RowBatch& batch) {
                          std::vector<T> taken = take_rows(batch, x, k), out(batch.rows.size() * f);
                          gated_linear(context.runtime(batch.threads), dtype_of<T>(),
                                       {int64_t(batch.rows.size()), f, k, taken.data(),
                                        packed.data(), bias.data(), activation, out.data()});
                          return bytes_of(out);
                        }});
}

TEST(a_gated_linear_row_does_not_depend_on_its_batch) {
  for (Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu,
                                Activation::kClampedSwiglu}) {
    check_gated<bf16>(context, activation);
    check_gated<float>(context, activation);
  }
}

struct NormRows {
  static constexpr int64_t width = 100;
  std::vector<float> x, residual, weight;

  NormRows() {
    Random random(43);
    x = random_values<float>(random, kRows * width, 3);
    residual = random_values<float>(random, kRows * width);
    weight = random_values<float>(random, width);
  }

  NormTask task(const std::vector<float>& taken, void* out) const {
    int64_t rows = int64_t(taken.size()) / width;
    return {rows, width, taken.data(), weight.data(), 1e-5f, nullptr, out, false};
  }
};

template <class T>
void check_norm(const Context& context) {
  const NormRows norm;
  const int64_t width = NormRows::width;
  check_exact(context, {"rms_norm", width * int64_t(sizeof(T)), kRows, [&](const RowBatch& batch) {
                          std::vector<float> taken = take_rows(batch, norm.x, width);
                          std::vector<T> out(taken.size());
                          rms_norm(context.runtime(batch.threads), dtype_of<T>(),
                                   norm.task(taken, out.data()));
                          return bytes_of(out);
                        }});
  check_exact(context, {"rms_norm with a residual", width * 4, kRows, [&](const RowBatch& batch) {
                          std::vector<float> taken = take_rows(batch, norm.x, width);
                          std::vector<float> out = take_rows(batch, norm.residual, width);
                          NormTask task = norm.task(taken, out.data());
                          task.out_is_f32 = true;
                          task.residual = out.data();
                          rms_norm(context.runtime(batch.threads), dtype_of<T>(), task);
                          return bytes_of(out);
                        }});
}

TEST(a_norm_row_does_not_depend_on_its_batch) {
  check_norm<bf16>(context);
  check_norm<float>(context);
}

// The table's last rows hold poison values (NaN, Inf), next to rows that other tokens look up.
template <class T>
void check_embed(const Context& context, bool is_packed) {
  constexpr int64_t width = 45, vocab = kRows + int64_t(std::size(kPoisons));
  Random random(44);
  std::vector<T> table = random_values<T>(random, vocab * width);
  for (size_t p = 0; p < std::size(kPoisons); p++) {
    for (size_t i = 0; i < width; i++) set(table[(kRows + p) * width + i], kPoisons[p]);
  }
  Aligned packed(packed_bytes(vocab, width, dtype_of<T>(), false));
  pack(*context.executors[0],
       {{{table.data(), dtype_of<T>(), vocab, width}}, width, packed.data(), dtype_of<T>(), false});
  const void* source = is_packed ? packed.data() : table.data();
  check_exact(context, {"embed", width * 4, kRows, [&](const RowBatch& batch) {
                          std::vector<int32_t> ids;
                          for (const RowContent& row : batch.rows) {
                            auto poison = std::find_if(
                                std::begin(kPoisons), std::end(kPoisons),
                                [&](float p) { return same_bits(&p, &row.poison, 1); });
                            int64_t bad = kRows + (poison - std::begin(kPoisons));
                            ids.push_back(int32_t(row.is_poisoned ? bad : row.data));
                          }
                          std::vector<float> out(ids.size() * width);
                          embed(context.runtime(batch.threads), format_of(dtype_of<T>()),
                                {int64_t(ids.size()), width, vocab, ids.data(), source, is_packed,
                                 2.5f, out.data()});
                          return bytes_of(out);
                        }});
}

TEST(an_embedding_row_does_not_depend_on_its_batch) {
  for (bool is_packed : {false, true}) {
    check_embed<bf16>(context, is_packed);
    check_embed<float>(context, is_packed);
  }
}

// Greedy and sampled rows, with and without logprobs, with and without a logit transform.
template <class T>
void check_next_token(const Context& context, LogitTransform transform) {
  Head<T> head(context, 1, 397);
  Random random(45);
  std::vector<T> x = random_values<T>(random, kRows * kWidth);
  std::vector<SampleParams> params = many_params(kRows);
  check_exact(context, {"next_token", kSampleColumns * 4, kRows, [&](const RowBatch& batch) {
                          std::vector<SampleParams> own;
                          for (const RowContent& row : batch.rows) {
                            own.push_back(params[size_t(row.data)]);
                          }
                          std::vector<T> taken = take_rows(batch, x, kWidth);
                          return bytes_of(
                              choose(context, head, taken, own, batch.threads, transform));
                        }});
}

TEST(a_next_token_row_does_not_depend_on_its_batch) {
  check_next_token<bf16>(context, {});
  check_next_token<float>(context, {2.0f, 15.0f});
}

// Negative controls: sums over a row's values whose order or terms depend on the batch.
RowOperation faulty(const char* name, float (*sum)(const RowBatch&, const float*, size_t)) {
  constexpr int64_t width = 150;
  Random random(46);
  std::vector<float> x = random_values<float>(random, 65 * width);
  return {name, 4, 65, [=](const RowBatch& batch) {
            std::vector<float> taken = take_rows(batch, x, width), out;
            for (size_t row = 0; row < batch.rows.size(); row++) {
              out.push_back(sum(batch, taken.data(), row));
            }
            return bytes_of(out);
          }};
}

float sum_in_parts(const float* x, size_t parts) {
  float total = 0;
  for (size_t p = 0; p < parts; p++) {
    float sum = 0;
    for (size_t i = p * 150 / parts; i < (p + 1) * 150 / parts; i++) sum += x[i];
    total += sum;
  }
  return total;
}

TEST(operations_that_depend_on_the_batch_are_detected) {
  auto alone = [](const RowBatch&, const float* x, size_t row) {
    return sum_in_parts(x + row * 150, 3);
  };
  auto by_rows = [](const RowBatch& batch, const float* x, size_t row) {
    return sum_in_parts(x + row * 150, batch.rows.size() > 8 ? 3 : 1);
  };
  auto by_index = [](const RowBatch&, const float* x, size_t row) {
    return sum_in_parts(x + row * 150, row == 14 ? 3 : 1);
  };
  auto by_threads = [](const RowBatch& batch, const float* x, size_t row) {
    return sum_in_parts(x + row * 150, batch.threads + 1);
  };
  auto times_zero = [](const RowBatch& batch, const float* x, size_t row) {
    size_t next = (row + 1) % batch.rows.size();
    return sum_in_parts(x + row * 150, 1) + 0.0f * x[next * 150];
  };
  CHECK(find_inexactness(context, faulty("independent", alone)).empty());
  CHECK(!find_inexactness(context, faulty("by rows", by_rows)).empty());
  CHECK(!find_inexactness(context, faulty("by index", by_index)).empty());
  CHECK(!find_inexactness(context, faulty("by threads", by_threads)).empty());
  CHECK(!find_inexactness(context, faulty("multiplied by zero", times_zero)).empty());
}

}  // namespace
}  // namespace cadenza::tests
