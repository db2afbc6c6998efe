// Samples a row's token from its logits: filter thresholds without sorting, counter-based noise.
//
// A unit is one row. A row's result depends on that row alone; all sums have a fixed order.
#pragma once

#include <cmath>

#include "core/kernel_table.h"
#include "kernels/rules.h"

namespace cadenza::CADENZA_ISA {

constexpr float kInfinity = __builtin_inff();
// At most this many candidates are searched by bisecting the threshold's bits, without further
// narrowing.
constexpr int64_t kShortList = 256;
constexpr int kMaxHalvings = 64;
// First threshold tried, as a distance below the largest value; most thresholds are above it.
constexpr float kFirstStep = 8.0f;

// The remaining tokens, ascending by id. Arrays are padded by 16 lanes (values by -inf).
struct Candidates {
  float* values;
  float* ids;     // token ids as raw int32 bits
  float* masses;  // exp(value - maximum); null unless top-p needs them
  int64_t count;
};

inline void pad_candidates(Candidates& c) {
  for (int i = 0; i < kLanes; i++) {
    c.values[c.count + i] = -kInfinity;
    c.ids[c.count + i] = 0.0f;
  }
}

// Keeps the candidates with value >= threshold, in place.
inline void keep_from(Candidates& c, float threshold) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; i += kLanes) {
    Vec value = load(c.values + i), id = load(c.ids + i);
    Mask inside = first(int(c.count - i < kLanes ? c.count - i : kLanes));
    Mask m = mask_and(inside, cmp_ge(value, set1(threshold)));
    int n = compress(c.values + kept, m, value);
    compress(c.ids + kept, m, id);
    if (c.masses != nullptr) compress(c.masses + kept, m, load(c.masses + i));
    kept += n;
  }
  c.count = kept;
  pad_candidates(c);
}

inline float largest_value(const Candidates& c) {
  Vec best = set1(-kInfinity);
  for (int64_t i = 0; i < c.count; i += kLanes) best = max(load(c.values + i), best);
  return reduce_max(best);
}

// The number of candidates with value >= threshold.
struct CountMeasure {
  double operator()(const Candidates& c, float threshold) const {
    int64_t count = 0;
    for (int64_t i = 0; i < c.count; i += kLanes) {
      count += __builtin_popcount(bits(cmp_ge(load(c.values + i), set1(threshold))));
    }
    // The padding is -inf and would be counted at a threshold of -inf.
    return double(threshold == -kInfinity ? c.count : count);
  }
};

// Sums terms(i) over vectors in an order fixed by the count: f32 lanes within runs of 64 vectors,
// runs in double. Monotonic: replacing non-negative terms by zero never increases the sum.
template <class Terms>
inline double ordered_sum(int64_t count, const Terms& terms) {
  constexpr int64_t kRun = 64 * kLanes;
  double total = 0.0;
  for (int64_t start = 0; start < count; start += kRun) {
    Vec sum = zero();
    for (int64_t i = start; i < count && i < start + kRun; i += kLanes) sum = add(sum, terms(i));
    total += double(reduce_add(sum));
  }
  return total;
}

// The probability mass, relative to exp(maximum), of the candidates with value >= threshold.
struct MassMeasure {
  double operator()(const Candidates& c, float threshold) const {
    return ordered_sum(c.count, [&](int64_t i) {
      Mask reaches = cmp_ge(load(c.values + i), set1(threshold));
      return select(reaches, load(c.masses + i), zero());
    });
  }
};

inline void compute_masses(Candidates& c, float maximum, Arena& arena) {
  c.masses = arena.take<float>(c.count + 2 * kLanes);
  for (int64_t i = 0; i < c.count; i += kLanes) {
    store(c.masses + i, exp_vec(sub(load(c.values + i), set1(maximum))));
  }
}

inline uint32_t ordered_bits(float x) {
  uint32_t raw;
  __builtin_memcpy(&raw, &x, 4);
  return raw >> 31 ? ~raw : raw | 0x80000000u;
}
inline float from_ordered(uint32_t key) {
  uint32_t raw = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  __builtin_memcpy(&x, &raw, 4);
  return x;
}

// Copies values and masses for a threshold search, which narrows them in place.
inline Candidates copy_values(const Candidates& c, Arena& arena) {
  int64_t padded = c.count + 2 * kLanes;
  Candidates copy{arena.take<float>(padded), nullptr, nullptr, c.count};
  if (c.masses != nullptr) copy.masses = arena.take<float>(padded);
  for (int64_t i = 0; i < c.count + kLanes; i += kLanes) {
    store(copy.values + i, load(c.values + i));
    if (c.masses != nullptr) store(copy.masses + i, load(c.masses + i));
  }
  return copy;
}

// Keeps the candidates with low <= value < high, in place.
inline void keep_between(Candidates& c, float low, float high) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; i += kLanes) {
    Vec value = load(c.values + i);
    Mask inside = first(int(c.count - i < kLanes ? c.count - i : kLanes));
    Mask m = mask_and(mask_and(inside, cmp_ge(value, set1(low))), cmp_gt(set1(high), value));
    int n = compress(c.values + kept, m, value);
    if (c.masses != nullptr) compress(c.masses + kept, m, load(c.masses + i));
    kept += n;
  }
  c.count = kept;
  for (int i = 0; i < kLanes; i++) c.values[c.count + i] = -kInfinity;
}

inline float smallest_value(const Candidates& c) {
  Vec best = set1(kInfinity);
  int64_t whole = c.count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) best = min(load(c.values + i), best);
  alignas(64) float lanes[kLanes];
  store(lanes, best);
  float smallest = lanes[0];
  for (float lane : lanes) smallest = lane < smallest ? lane : smallest;
  for (int64_t i = whole; i < c.count; i++) {
    smallest = c.values[i] < smallest ? c.values[i] : smallest;
  }
  return smallest;
}

// Keeps the smallest set {value >= t} whose measure reaches `wanted`; values equal to t are all
// kept.
//
// Invariant: the set at `low` reaches `wanted`, the set at `high` does not. The interval of values
// is halved; candidates outside it leave the search, and `above` holds the measure of those above
// it. Once few remain, t is found exactly by bisecting the ordered bits of the floats.
template <class Measure>
inline void keep_reaching(Candidates& c, double wanted, const Measure& measure, Arena& arena) {
  Candidates open = copy_values(c, arena);
  const float largest = largest_value(c);
  float low = -kInfinity, high = from_ordered(ordered_bits(largest) + 1);
  double above = 0.0;
  float step = kFirstStep;
  for (int i = 0; i < kMaxHalvings && open.count > kShortList; i++) {
    if (low == -kInfinity && step > kFirstStep) low = smallest_value(open);
    float middle = low == -kInfinity ? largest - step : low + 0.5f * (high - low);
    if (!(middle < high) || !(middle > low)) break;
    double reached = above + measure(open, middle);
    if (reached >= wanted) {
      low = middle;
      float smallest = smallest_value(open);
      if (smallest > low) low = smallest;
    } else {
      high = middle;
      above = reached;
    }
    step = 2.0f * kFirstStep;
    keep_between(open, low, high);
  }
  uint32_t inside = ordered_bits(low), outside = ordered_bits(high);
  while (outside - inside > 1) {
    uint32_t middle = inside + (outside - inside) / 2;
    if (above + measure(open, from_ordered(middle)) >= wanted) {
      inside = middle;
    } else {
      outside = middle;
    }
  }
  keep_from(c, from_ordered(inside));
}

// Uniform random bits of a token, from the row's draw key.
inline VecI hash_tokens(VecI token, const uint32_t key[2]) {
  VecI x = xor_i(mul_i(token, set1_i(0x9E3779B9u)), set1_i(key[0]));
  x = mul_i(xor_i(x, shr<17>(x)), set1_i(0xed5ad4bbu));
  x = add_i(xor_i(x, shr<11>(x)), set1_i(key[1]));
  x = mul_i(x, set1_i(0xac4c1b51u));
  x = mul_i(xor_i(x, shr<15>(x)), set1_i(0x31848babu));
  return xor_i(x, shr<14>(x));
}

// -log(-log1p(-u)), u = min((bits + 0.5) 2^-32, 1 - 2^-24).
inline Vec gumbel_noise(VecI random) {
  Vec u = mul(add(from_u32(random), set1(0.5f)), set1(0x1p-32f));
  u = min(u, set1(1.0f - 0x1p-24f));
  return sub(zero(), log_vec(sub(zero(), log1p_neg(u))));
}

// An upper bound on gumbel_noise: -log1p(-u) >= u, and u >= 2^(e - 32) for bits in [2^e, 2^(e+1)).
inline Vec noise_bound(VecI random) {
  Vec number = from_u32(or_i(random, set1_i(1)));
  Vec exponent = from_i32(sub_i(shr<23>(as_int(number)), set1_i(127)));
  // 33 instead of 32, because zero bits give u = 2^-33 and from_u32 may round up to 2^(e+1).
  return mul(sub(set1(33.01f), exponent), set1(0.6931473f));
}

struct Choice {
  float value;
  int32_t id;
};

inline void update_best(Choice& best, Vec values, Vec ids) {
  if (!any(cmp_gt(values, set1(best.value)))) return;
  alignas(64) float value[kLanes];
  alignas(64) uint32_t id[kLanes];
  store(value, values);
  store_i(id, as_int(ids));
  for (int i = 0; i < kLanes; i++) {
    if (value[i] > best.value) best = {value[i], int32_t(id[i])};
  }
}

inline Choice choose_gumbel_max(const Candidates& c, const uint32_t key[2]) {
  Choice best{-kInfinity, 0};
  for (int64_t i = 0; i < c.count; i += kLanes) {
    Vec value = load(c.values + i), ids = load(c.ids + i);
    VecI random = hash_tokens(as_int(ids), key);
    if (!any(cmp_gt(add(value, noise_bound(random)), set1(best.value)))) continue;
    update_best(best, add(value, gumbel_noise(random)), ids);
  }
  return best;
}

inline Choice choose_greedy(const Candidates& c) {
  Choice best{-kInfinity, 0};
  for (int64_t i = 0; i < c.count; i += kLanes) {
    update_best(best, load(c.values + i), load(c.ids + i));
  }
  return best;
}

// Adds the tokens [begin, end) to the candidates, ascending.
inline void take_range(const SampledRow& row, int64_t begin, int64_t end, Candidates& c) {
  for (int64_t i = begin; i < end; i += kLanes) {
    int n = int(end - i < kLanes ? end - i : kLanes);
    store(c.values + c.count, load_some(row.logits + i, n));
    store(c.ids + c.count, as_float(add_i(iota(), set1_i(uint32_t(i)))));
    c.count += n;
  }
}

// Makes every token but the banned one a candidate, ascending.
inline void take_all(const SampledRow& row, const SampleTask& task, Candidates& c) {
  const bool has_banned = task.banned >= 0 && task.banned < task.vocab;
  if (has_banned) take_range(row, 0, task.banned, c);
  take_range(row, has_banned ? task.banned + 1 : 0, task.vocab, c);
}

// Makes the tokens allowed by the row's mask and by its other rules candidates, ascending, but for
// the banned one.
inline void take_allowed(const SampledRow& row, const SampleTask& task, Candidates& c) {
  const int32_t* mask = row.params.rules.record + kRuleMask;
  const int64_t vocab = task.vocab;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    uint32_t allowed = uint32_t(mask[i / 32]) >> (i % 32) & ((1u << kLanes) - 1);
    const int64_t banned = task.banned - i;
    if (banned >= 0 && banned < kLanes) allowed &= ~(1u << banned);
    if (allowed == 0) continue;
    int n = int(vocab - i < kLanes ? vocab - i : kLanes);
    Vec value = load_some(row.logits + i, n);
    Mask kept = mask_and(mask_and(from_bits(allowed), first(n)), cmp_ge(value, set1(-__FLT_MAX__)));
    compress(c.values + c.count, kept, value);
    c.count += compress(c.ids + c.count, kept, as_float(add_i(iota(), set1_i(uint32_t(i)))));
  }
}

// The row's candidates, with values divided by its temperature. Banned tokens are left out.
inline Candidates candidates_of(const SampledRow& row, const SampleTask& task, Arena& arena) {
  int64_t padded = round_up(task.vocab, kLanes) + kLanes;
  Candidates c{arena.take<float>(padded), arena.take<float>(padded), nullptr, 0};
  const int32_t* record = row.params.rules.record;
  if (record != nullptr && record[kRuleHasMask] > 0) {
    take_allowed(row, task, c);
    pad_candidates(c);
  } else {
    take_all(row, task, c);
    pad_candidates(c);
    if (record != nullptr) keep_from(c, -__FLT_MAX__);
  }
  if (row.params.temperature > 0.0f) {
    Vec temperature = set1(row.params.temperature);
    for (int64_t i = 0; i < c.count; i += kLanes) {
      store(c.values + i, div(load(c.values + i), temperature));
    }
  }
  return c;
}

// The standard deviation of the candidates' values. Distances from the maximum are scaled by the
// largest, so that their squares cannot overflow.
inline float deviation(const Candidates& c, float maximum) {
  const float largest = maximum - smallest_value(c);
  if (!(largest > 0.0f)) return 0.0f;
  if (largest > __FLT_MAX__) return kInfinity;
  auto mean_of = [&](auto&& term) {
    double total = ordered_sum(c.count, [&](int64_t i) {
      Mask inside = first(int(c.count - i < kLanes ? c.count - i : kLanes));
      Vec units = div(sub(set1(maximum), load(c.values + i)), set1(largest));
      return select(inside, term(units), zero());
    });
    return float(total / double(c.count));
  };
  const Vec mean = set1(mean_of([](Vec units) { return units; }));
  float variance = mean_of([&](Vec units) { return mul(sub(units, mean), sub(units, mean)); });
  return largest * std::sqrt(variance);
}

// Applies top-n-sigma, min-p, top-k and top-p, in this order.
inline void filter(Candidates& c, const SampleParams& params, Arena& arena) {
  float maximum = largest_value(c);
  if (params.top_n_sigma > 0.0f) {
    keep_from(c, maximum - params.top_n_sigma * deviation(c, maximum));
  }
  if (params.min_p > 0.0f) {
    alignas(64) float log_min_p[kLanes];
    store(log_min_p, log_vec(set1(params.min_p)));
    keep_from(c, maximum + log_min_p[0]);
  }
  if (params.top_k > 0 && params.top_k < c.count) {
    keep_reaching(c, params.top_k, CountMeasure{}, arena);
  }
  if (params.top_p < 1.0f) {
    compute_masses(c, maximum, arena);
    MassMeasure mass;
    keep_reaching(c, double(params.top_p) * mass(c, -kInfinity), mass, arena);
  }
}

// Writes the row's token, or the state kStateNoneAllowed if it has no candidates.
inline void choose(const SampledRow& row, const SampleTask& task, Arena& arena) {
  Candidates c = candidates_of(row, task, arena);
  if (c.count == 0) {
    row.out[kColumnToken] = 0;
    if (row.out[kColumnState] == kStateChosen) row.out[kColumnState] = kStateNoneAllowed;
    return;
  }
  if (!(row.params.temperature > 0.0f)) {
    row.out[kColumnToken] = choose_greedy(c).id;
    return;
  }
  filter(c, row.params, arena);
  row.out[kColumnToken] = choose_gumbel_max(c, row.params.key).id;
}

inline void choose_with_rules(const SampledRow& row, const SampleTask& task, Arena& arena) {
  const RowRules& rules = row.params.rules;
  UndoableLogits logits(row.logits, task.vocab, max_rule_changes(rules), arena);
  apply_rules(rules, logits, arena);
  choose(row, task, arena);
  logits.restore();
}

// Log-sum-exp of the logits, in a fixed order.
inline float log_sum_exp(const float* logits, int64_t vocab) {
  Vec best = set1(-kInfinity);
  for (int64_t i = 0; i < vocab; i += kLanes) best = max(load(logits + i), best);
  float maximum = reduce_max(best);
  double total =
      ordered_sum(vocab, [&](int64_t i) { return exp_vec(sub(load(logits + i), set1(maximum))); });
  alignas(64) float lanes[kLanes];
  store(lanes, log_vec(set1(float(total))));
  return maximum + lanes[0];
}

// The largest logits in descending order, ties by ascending id.
inline void top_logits(const float* logits, int64_t vocab, Choice (&top)[kTopLogprobs]) {
  for (Choice& entry : top) entry = {-kInfinity, 0};
  alignas(64) float lanes[kLanes];
  for (int64_t i = 0; i < vocab; i += kLanes) {
    Vec value = load(logits + i);
    if (!any(cmp_gt(value, set1(top[kTopLogprobs - 1].value)))) continue;
    store(lanes, value);
    for (int lane = 0; lane < kLanes; lane++) {
      int at = kTopLogprobs;
      while (at > 0 && lanes[lane] > top[at - 1].value) at--;
      if (at == kTopLogprobs) continue;
      for (int j = kTopLogprobs - 1; j > at; j--) top[j] = top[j - 1];
      top[at] = {lanes[lane], int32_t(i + lane)};
    }
  }
}

inline int64_t count_above(const float* logits, int64_t vocab, float value) {
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    count += __builtin_popcount(bits(cmp_gt(load(logits + i), set1(value))));
  }
  return count;
}

inline int32_t float_bits(float x) {
  int32_t raw;
  __builtin_memcpy(&raw, &x, 4);
  return raw;
}

inline void write_logprobs(const SampledRow& row, int64_t vocab) {
  float total = log_sum_exp(row.logits, vocab);
  float chosen = row.logits[row.out[kColumnToken]];
  row.out[kColumnLogprob] = float_bits(chosen - total);
  row.out[kColumnRank] = int32_t(1 + count_above(row.logits, vocab, chosen));
  Choice top[kTopLogprobs];
  top_logits(row.logits, vocab, top);
  for (int i = 0; i < kTopLogprobs; i++) {
    row.out[kColumnTop + i] = top[i].id;
    row.out[kColumnTop + kTopLogprobs + i] = float_bits(top[i].value - total);
  }
}

// row.out already holds the argmax token; it is overwritten for rows with a target, rules or a
// temperature above 0.
void sample_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const SampleTask*>(context);
  for (int64_t i = begin; i < end; i++) {
    const SampledRow& row = task.rows[i];
    const SampleParams& params = row.params;
    worker.arena.reset();
    if (params.target >= 0) {
      row.out[kColumnToken] = params.target;
    } else if (params.rules.record != nullptr) {
      choose_with_rules(row, task, worker.arena);
    } else if (params.temperature > 0.0f) {
      choose(row, task, worker.arena);
    }
    if (params.num_logprobs >= 0) write_logprobs(row, task.vocab);
  }
}

}  // namespace cadenza::CADENZA_ISA
