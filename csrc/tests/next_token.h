// Shared by the tests of next_token: an LM head, a call of the operation, and a reference sampler
// that sorts in double precision.
#pragma once

#include <algorithm>
#include <numeric>

#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {

constexpr int64_t kVocab = 5003, kWidth = 24;

template <class T>
struct Head {
  int64_t vocab;
  std::vector<T> rows;
  Aligned packed;

  explicit Head(const Context& context, float scale = 1, int64_t vocab_ = kVocab)
      : vocab(vocab_), packed(packed_bytes(vocab_, kWidth, dtype_of<T>(), false)) {
    Random random(1);
    rows = random_values<T>(random, vocab * kWidth, scale);
    pack(*context.executors[1], {{{rows.data(), dtype_of<T>(), vocab, kWidth}},
                                 kWidth,
                                 packed.data(),
                                 dtype_of<T>(),
                                 false});
  }
};

inline SampleParams greedy() { return {0, 0, 1, 0, {0, 0}, -1}; }

template <class T>
std::vector<int32_t> choose(const Context& context, Head<T>& head, const std::vector<T>& x,
                            const std::vector<SampleParams>& params, size_t threads,
                            LogitTransform transform = {}, int64_t banned = kNoToken) {
  std::vector<int32_t> out(params.size() * kSampleColumns, 77);
  NextTokenTask task{{int64_t(params.size()), head.vocab, kWidth, x.data(), head.packed.data(),
                      nullptr, nullptr, nullptr, false},
                     params.data(),
                     out.data(),
                     transform,
                     banned};
  next_token(context.runtime(threads), dtype_of<T>(), task);
  return out;
}

// A row's logits, bitwise as in next_token.
template <class T>
std::vector<float> logits_of(const Context& context, Head<T>& head, const T* x) {
  std::vector<float> out(static_cast<size_t>(head.vocab));
  linear(context.runtime(), dtype_of<T>(),
         {1, head.vocab, kWidth, x, head.packed.data(), nullptr, nullptr, out.data(), true});
  return out;
}

inline double noise(uint32_t token, const uint32_t key[2]) {
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
inline std::vector<int> kept_tokens(const std::vector<float>& z, const SampleParams& params) {
  std::vector<int> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return z[size_t(a)] > z[size_t(b)]; });
  auto keep_ties = [&](size_t count) {
    while (count < order.size() && z[size_t(order[count])] == z[size_t(order[count - 1])]) count++;
    order.resize(count);
  };
  double maximum = z[size_t(order[0])], total = 0, sum = 0;
  if (params.top_n_sigma > 0) {
    std::vector<double> allowed;
    for (int t : order) {
      if (z[size_t(t)] > -INFINITY) allowed.push_back(double(z[size_t(t)]));
    }
    double mean = 0, variance = 0, count = double(allowed.size());
    for (double value : allowed) mean += value / count;
    for (double value : allowed) variance += (value - mean) * (value - mean) / count;
    double floor = maximum - double(params.top_n_sigma) * std::sqrt(variance);
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](int t) { return z[size_t(t)] < floor - 1e-5; }),
                order.end());
  }
  if (params.min_p > 0) {
    double floor = maximum + std::log(double(params.min_p));
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](int t) { return z[size_t(t)] < floor - 1e-5; }),
                order.end());
  }
  if (params.top_k > 0 && params.top_k < int(order.size())) keep_ties(size_t(params.top_k));
  for (int t : order) total += std::exp(z[size_t(t)] - maximum);
  if (params.top_p < 1) {
    size_t count = 0;
    while (count < order.size() && sum < params.top_p * total)
      sum += std::exp(z[size_t(order[count++])] - maximum);
    keep_ties(std::max<size_t>(count, 1));
  }
  return order;
}

inline void check_sampled(const std::vector<float>& logits, const SampleParams& params, int token) {
  std::vector<float> z(logits.size());
  for (size_t i = 0; i < z.size(); i++) {
    z[i] = logits[i] / params.temperature;
  }
  std::vector<int> kept = kept_tokens(z, params);
  double best = -1e300;
  for (int t : kept) best = std::max(best, double(z[size_t(t)]) + noise(uint32_t(t), params.key));
  double mine = double(z[size_t(token)]) + noise(uint32_t(token), params.key);
  CHECK_NEAR(mine, best, 1e-4 * (1 + std::abs(best)));
  CHECK(std::find(kept.begin(), kept.end(), token) != kept.end());
}

inline std::vector<SampleParams> many_params(int count) {
  std::vector<SampleParams> all;
  Random random(6);
  const float top_ps[] = {1, 0.9f, 0.5f, 0.05f, 0.999f};
  for (int i = 0; i < count; i++) {
    SampleParams p = greedy();
    p.temperature = i % 5 == 4 ? 0 : 0.3f + 0.2f * float(i % 7);
    p.top_k = i % 3 == 0 ? 0 : 1 + i * 13 % 900;
    p.top_p = top_ps[i % 5];
    p.min_p = i % 4 == 1 ? 0.02f : 0;
    p.top_n_sigma = i % 7 == 3 ? 0.5f + 0.25f * float(i % 5) : 0;
    p.key[0] = random.next();
    p.key[1] = random.next();
    p.num_logprobs = i % 6 == 2 ? 5 : -1;
    all.push_back(p);
  }
  return all;
}

}  // namespace cadenza::tests
