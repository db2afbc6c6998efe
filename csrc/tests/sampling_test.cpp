// next_token: against a sort in double precision, rule 1, and what rows may not see of each other.
#include <algorithm>
#include <numeric>

#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {
namespace {

constexpr int64_t kVocab = 5003, kWidth = 24;

struct Head {
  std::vector<float> rows;
  Aligned packed{packed_bytes(kVocab, kWidth, DType::kF32, false)};

  explicit Head(const Context& context, float scale = 1) {
    Random random(1);
    rows = random_values<float>(random, kVocab * kWidth, scale);
    pack(*context.executors[1], {rows.data(), DType::kF32, kVocab, kWidth, kWidth, packed.data(),
                                 DType::kF32, kVocab, 0, PackLayout::kPlain});
  }
};

SampleParams greedy() { return {0, 0, 1, 0, {0, 0}, -1, nullptr}; }

std::vector<int32_t> choose(const Context& context, Head& head, const std::vector<float>& x,
                            const std::vector<SampleParams>& params, size_t threads) {
  std::vector<int32_t> out(params.size() * kSampleColumns, 77);
  NextTokenTask task{{int64_t(params.size()), kVocab, kWidth, x.data(), head.packed.data(), nullptr,
                      nullptr, nullptr, false},
                     params.data(),
                     out.data()};
  next_token(context.runtime(threads), DType::kF32, task);
  return out;
}

// The row's logits with the kernel's own bits.
std::vector<float> logits_of(const Context& context, Head& head, const float* x) {
  std::vector<float> out(kVocab);
  linear(context.runtime(), DType::kF32,
         {1, kVocab, kWidth, x, head.packed.data(), nullptr, nullptr, out.data(), true});
  return out;
}

double noise(uint32_t token, const uint32_t key[2]) {
  uint32_t x = token * 0x9E3779B9u ^ key[0];
  x ^= x >> 17;
  x *= 0xed5ad4bbu;
  x ^= x >> 11;
  x += key[1];
  x *= 0xac4c1b51u;
  x ^= x >> 15;
  x *= 0x31848babu;
  x ^= x >> 14;
  float u = std::min((float(x) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -std::log(-std::log1p(-double(u)));
}

// The tokens that the filters keep, in descending order of value.
std::vector<int> kept_tokens(const std::vector<float>& z, const SampleParams& params) {
  std::vector<int> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return z[size_t(a)] > z[size_t(b)]; });
  auto cut_ties = [&](size_t count) {
    while (count < order.size() && z[size_t(order[count])] == z[size_t(order[count - 1])]) count++;
    order.resize(count);
  };
  if (params.top_k > 0 && params.top_k < int(z.size())) cut_ties(size_t(params.top_k));
  double maximum = z[size_t(order[0])], total = 0, sum = 0;
  for (int t : order) total += std::exp(z[size_t(t)] - maximum);
  if (params.top_p < 1) {
    size_t count = 0;
    while (count < order.size() && sum < params.top_p * total)
      sum += std::exp(z[size_t(order[count++])] - maximum);
    cut_ties(std::max<size_t>(count, 1));
  }
  if (params.min_p > 0) {
    double floor = maximum + std::log(double(params.min_p));
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](int t) { return z[size_t(t)] < floor - 1e-5; }),
                order.end());
  }
  return order;
}

void check_sampled(const std::vector<float>& logits, const SampleParams& params, int token) {
  std::vector<float> z(logits.size());
  for (size_t i = 0; i < z.size(); i++) {
    z[i] = (logits[i] + (params.bias ? params.bias[i] : 0.0f)) / params.temperature;
  }
  std::vector<int> kept = kept_tokens(z, params);
  double best = -1e300;
  for (int t : kept) best = std::max(best, double(z[size_t(t)]) + noise(uint32_t(t), params.key));
  double mine = double(z[size_t(token)]) + noise(uint32_t(token), params.key);
  CHECK_NEAR(mine, best, 1e-4 * (1 + std::abs(best)));
  CHECK(std::find(kept.begin(), kept.end(), token) != kept.end());
}

std::vector<SampleParams> many_params(int count) {
  std::vector<SampleParams> all;
  Random random(6);
  const float top_ps[] = {1, 0.9f, 0.5f, 0.05f, 0.999f};
  for (int i = 0; i < count; i++) {
    SampleParams p = greedy();
    p.temperature = i % 5 == 4 ? 0 : 0.3f + 0.2f * float(i % 7);
    p.top_k = i % 3 == 0 ? 0 : 1 + i * 13 % 900;
    p.top_p = top_ps[i % 5];
    p.min_p = i % 4 == 1 ? 0.02f : 0;
    p.key[0] = random.next();
    p.key[1] = random.next();
    p.num_logprobs = i % 6 == 2 ? 5 : -1;
    all.push_back(p);
  }
  return all;
}

TEST(next_token_agrees_with_a_sort_in_double_precision) {
  for (float scale : {0.05f, 1.0f}) {
    Head head(context, scale);
    Random random(12);
    const int rows = context.quick ? 12 : 60;
    std::vector<float> x = random_values<float>(random, rows * kWidth);
    std::vector<SampleParams> params = many_params(rows);
    std::vector<int32_t> out = choose(context, head, x, params, 1);
    for (int r = 0; r < rows; r++) {
      const int32_t* row = out.data() + r * kSampleColumns;
      std::vector<float> logits = logits_of(context, head, x.data() + r * kWidth);
      CHECK(row[kColumnFinite] == 1);
      if (params[size_t(r)].temperature > 0) {
        check_sampled(logits, params[size_t(r)], row[kColumnToken]);
      } else {
        CHECK(row[kColumnToken] == std::max_element(logits.begin(), logits.end()) - logits.begin());
      }
    }
  }
}

TEST(next_token_rows_have_the_same_bits_alone_and_in_company) {
  Head head(context);
  Random random(13);
  const int rows = context.quick ? 9 : 65;
  std::vector<float> x = random_values<float>(random, rows * kWidth);
  std::vector<SampleParams> params = many_params(rows);
  std::vector<int32_t> first;
  for (size_t threads = 0; threads < 3; threads++) {
    std::vector<int32_t> out = choose(context, head, x, params, threads);
    if (threads == 0) first = out;
    CHECK(out == first);
  }
  for (int r = 0; r < rows; r++) {
    std::vector<float> row(x.begin() + r * kWidth, x.begin() + (r + 1) * kWidth);
    std::vector<int32_t> alone = choose(context, head, row, {params[size_t(r)]}, 1);
    CHECK(same_bits(alone.data(), first.data() + r * kSampleColumns, kSampleColumns));
  }
}

TEST(logprobs_are_right_and_change_no_other_bit) {
  Head head(context);
  Random random(14);
  std::vector<float> x = random_values<float>(random, 8 * kWidth);
  std::vector<SampleParams> with = many_params(8), without = with;
  for (auto& p : with) p.num_logprobs = 20;
  for (auto& p : without) p.num_logprobs = -1;
  std::vector<int32_t> out = choose(context, head, x, with, 1),
                       bare = choose(context, head, x, without, 1);
  for (int r = 0; r < 8; r++) {
    const int32_t *row = out.data() + r * kSampleColumns, *plain = bare.data() + r * kSampleColumns;
    CHECK(row[0] == plain[0] && row[1] == plain[1]);
    for (int c = 2; c < kSampleColumns; c++) CHECK(plain[c] == 0);
    std::vector<float> logits = logits_of(context, head, x.data() + r * kWidth);
    double maximum = *std::max_element(logits.begin(), logits.end()), total = 0;
    for (float v : logits) total += std::exp(v - maximum);
    auto logprob = [&](int t) { return logits[size_t(t)] - maximum - std::log(total); };
    auto value = [&](int column) {
      float v;
      std::memcpy(&v, row + column, 4);
      return v;
    };
    CHECK_NEAR(value(kColumnLogprob), logprob(row[0]), 1e-4);
    float chosen = logits[size_t(row[0])];
    CHECK(row[kColumnRank] ==
          1 + std::count_if(logits.begin(), logits.end(), [&](float v) { return v > chosen; }));
    SampleParams all = greedy();
    std::vector<int> order = kept_tokens(logits, all);
    for (int i = 0; i < kTopLogprobs; i++) {
      CHECK(row[kColumnTop + i] == order[size_t(i)]);
      CHECK_NEAR(value(kColumnTop + kTopLogprobs + i), logprob(order[size_t(i)]), 1e-4);
    }
  }
}

TEST(a_row_that_is_not_finite_raises_its_own_flag_only) {
  Head head(context);
  Random random(15);
  for (float poison : {kNaN, kInf, -kInf}) {
    std::vector<float> x = random_values<float>(random, 5 * kWidth);
    std::vector<SampleParams> params = many_params(5);
    std::vector<int32_t> clean = choose(context, head, x, params, 1);
    x[size_t(2 * kWidth + 3)] = poison;
    std::vector<int32_t> out = choose(context, head, x, params, 1);
    CHECK(out[2 * kSampleColumns + kColumnFinite] == 0);
    CHECK(out[2 * kSampleColumns] >= 0 && out[2 * kSampleColumns] < kVocab);
    CHECK(same_bits(out.data(), clean.data(), 2 * kSampleColumns));
    CHECK(same_bits(out.data() + 3 * kSampleColumns, clean.data() + 3 * kSampleColumns,
                    2 * kSampleColumns));
  }
}

TEST(ties_go_to_the_lowest_id_and_a_bias_forbids) {
  Head head(context);
  std::vector<float> x(kWidth, 0.0f), bias(kVocab, 0.0f);
  SampleParams params = greedy();
  CHECK(choose(context, head, x, {params}, 2)[0] == 0);
  for (int64_t i = 0; i < 40; i++) bias[size_t(i)] = -kInf;
  params.bias = bias.data();
  std::vector<int32_t> out = choose(context, head, x, {params}, 1);
  CHECK(out[0] == 40 && out[1] == 1);
  params.temperature = 1;
  for (uint32_t k = 0; k < 50; k++) {
    params.key[0] = k;
    CHECK(choose(context, head, x, {params}, 1)[0] >= 40);
  }
}

}  // namespace
}  // namespace cadenza::tests
