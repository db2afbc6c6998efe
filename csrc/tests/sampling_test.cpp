// next_token: compared with a sort in double precision, and independence of rows.
#include <algorithm>
#include <cstring>

#include "tests/next_token.h"

namespace cadenza::tests {
namespace {

TEST(next_token_agrees_with_a_sort_in_double_precision) {
  for (float scale : {0.05f, 1.0f}) {
    Head<float> head(context, scale);
    Random random(12);
    const int rows = context.quick ? 12 : 60;
    std::vector<float> x = random_values<float>(random, rows * kWidth);
    std::vector<SampleParams> params = many_params(rows);
    std::vector<int32_t> out = choose(context, head, x, params, 1);
    for (int r = 0; r < rows; r++) {
      const int32_t* row = out.data() + r * kSampleColumns;
      std::vector<float> logits = logits_of(context, head, x.data() + r * kWidth);
      CHECK(row[kColumnState] == 1);
      if (params[size_t(r)].temperature > 0) {
        check_sampled(logits, params[size_t(r)], row[kColumnToken]);
      } else {
        CHECK(row[kColumnToken] == std::max_element(logits.begin(), logits.end()) - logits.begin());
      }
    }
  }
}

TEST(next_token_rows_have_the_same_bits_alone_and_in_a_batch) {
  Head<float> head(context);
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

TEST(logprobs_agree_with_double_precision_and_do_not_change_the_token) {
  Head<float> head(context);
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

TEST(logits_are_divided_and_capped_before_sampling_and_logprobs) {
  Head<float> head(context, 4);
  Random random(16);
  const LogitTransform transform{3.0f, 2.5f};
  std::vector<float> x = random_values<float>(random, 6 * kWidth);
  std::vector<SampleParams> params = many_params(6);
  for (SampleParams& p : params) p.num_logprobs = 20;
  std::vector<int32_t> out = choose(context, head, x, params, 1, transform);
  for (int64_t r = 0; r < 6; r++) {
    std::vector<float> logits = logits_of(context, head, x.data() + r * kWidth);
    double total = 0;
    for (float& v : logits) {
      v = float(2.5 * std::tanh(double(v) / 3.0 / 2.5));
      total += std::exp(double(v));
    }
    const int32_t* row = out.data() + r * kSampleColumns;
    if (params[size_t(r)].temperature > 0) {
      check_sampled(logits, params[size_t(r)], row[0]);
    } else {
      float best = *std::max_element(logits.begin(), logits.end());
      CHECK_NEAR(logits[size_t(row[0])], best, 1e-6);
    }
    float logprob;
    std::memcpy(&logprob, row + kColumnLogprob, 4);
    CHECK_NEAR(logprob, logits[size_t(row[0])] - std::log(total), 1e-5);
  }
}

// It is the likeliest token of the first row, beside an edge of a panel, or alone in the last one.
TEST(a_banned_token_is_counted_by_nothing_that_chooses) {
  Head<float> head(context, 0.5f);
  Random random(17);
  const int rows = context.quick ? 8 : 40;
  std::vector<float> x = random_values<float>(random, rows * kWidth);
  std::vector<SampleParams> params = many_params(rows);
  const std::vector<int32_t> plain = choose(context, head, x, params, 1);
  for (int64_t banned : {int64_t(plain[4 * kSampleColumns]), int64_t(0), int64_t(kPanel),
                         int64_t(kVocab - 1), kVocab + 9}) {
    std::vector<int32_t> out = choose(context, head, x, params, 1, {}, banned);
    for (int r = 0; r < rows; r++) {
      const int32_t *row = out.data() + r * kSampleColumns, *free = &plain[size_t(row - out.data())];
      const SampleParams& own = params[size_t(r)];
      std::vector<float> logits = logits_of(context, head, x.data() + r * kWidth);
      if (banned < kVocab) logits[size_t(banned)] = -kInf;
      CHECK(row[kColumnState] == 1);
      if (own.temperature > 0) {
        check_sampled(logits, own, row[kColumnToken]);
      } else {
        CHECK(row[kColumnToken] == std::max_element(logits.begin(), logits.end()) - logits.begin());
      }
      // Log probabilities are of all tokens.
      CHECK(same_bits(row + kColumnTop, free + kColumnTop, 2 * kTopLogprobs));
    }
  }
}

TEST(a_row_with_non_finite_logits_sets_only_its_own_state) {
  Head<float> head(context);
  Random random(15);
  for (float poison : {kNaN, kInf, -kInf}) {
    const LogitTransform transform = poison > 0 ? LogitTransform{2.0f, 30.0f} : LogitTransform{};
    std::vector<float> x = random_values<float>(random, 5 * kWidth);
    std::vector<SampleParams> params = many_params(5);
    std::vector<int32_t> clean = choose(context, head, x, params, 1, transform);
    x[size_t(2 * kWidth + 3)] = poison;
    std::vector<int32_t> out = choose(context, head, x, params, 1, transform);
    CHECK(out[2 * kSampleColumns + kColumnState] == 0);
    CHECK(out[2 * kSampleColumns] >= 0 && out[2 * kSampleColumns] < kVocab);
    CHECK(same_bits(out.data(), clean.data(), 2 * kSampleColumns));
    CHECK(same_bits(out.data() + 3 * kSampleColumns, clean.data() + 3 * kSampleColumns,
                    2 * kSampleColumns));
  }
}

TEST(ties_go_to_the_lowest_id) {
  Head<float> head(context);
  std::vector<float> x(kWidth, 0.0f);
  CHECK(choose(context, head, x, {greedy()}, 2)[0] == 0);
}

}  // namespace
}  // namespace cadenza::tests
