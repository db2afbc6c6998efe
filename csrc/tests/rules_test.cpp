// Token rules: compared with a simple reference, independence of the batch, full lists, invalid
// records.
#include <climits>
#include <optional>

#include "tests/exactness.h"
#include "tests/next_token.h"

namespace cadenza::tests {
namespace {

constexpr int64_t kFewTokens = 397;  // not a multiple of a panel, a vector or a mask word

// The token rules of a request.
struct Rules {
  float presence = 0, frequency = 0, repetition = 1;
  int32_t num_prompt = 0, stops_from = 0;
  std::vector<std::pair<int32_t, float>> biases;
  std::vector<int32_t> stops;
  std::vector<std::vector<int32_t>> bad_words;
  std::optional<std::vector<int32_t>> allowed;
};

using Tokens = std::vector<int32_t>;

int32_t bits_of(float x) {
  int32_t raw;
  std::memcpy(&raw, &x, 4);
  return raw;
}

Tokens encode(const Rules& rules, int64_t vocab) {
  Tokens record(size_t(rule_words(vocab)), -1);
  std::fill(record.begin(), record.begin() + kRuleBiasIds, 0);
  record[kRuleNumPrompt] = rules.num_prompt;
  record[kRuleStopsFrom] = rules.stops_from;
  record[kRulePresence] = bits_of(rules.presence);
  record[kRuleFrequency] = bits_of(rules.frequency);
  record[kRuleRepetition] = bits_of(rules.repetition);
  for (size_t i = 0; i < rules.biases.size(); i++) {
    record[kRuleBiasIds + i] = rules.biases[i].first;
    record[kRuleBiasValues + i] = bits_of(rules.biases[i].second);
  }
  std::copy(rules.stops.begin(), rules.stops.end(), record.begin() + kRuleStops);
  auto words = record.begin() + kRuleBadWords;
  for (const Tokens& word : rules.bad_words) words = std::copy(word.begin(), word.end(), words + 1);
  CHECK(words <= record.begin() + kRuleMask);
  if (!rules.allowed.has_value()) return record;
  record[kRuleHasMask] = 1;
  std::fill(record.begin() + kRuleMask, record.end(), 0);
  for (int32_t id : *rules.allowed) {
    uint32_t word = uint32_t(record[size_t(kRuleMask + id / 32)]) | 1u << (id % 32);
    record[size_t(kRuleMask + id / 32)] = int32_t(word);
  }
  return record;
}

bool ends_with(const Rules& rules, const Tokens& tokens, const Tokens& word) {
  size_t before = word.size() - 1;
  if (tokens.size() < size_t(rules.num_prompt) + before) return false;
  return std::equal(word.begin(), word.end() - 1, tokens.end() - int64_t(before));
}

// Reference: applies the rules to the logits, one token at a time.
std::vector<float> reference_logits(std::vector<float> logits, const Rules& rules,
                                    const Tokens& tokens) {
  for (int32_t id = 0; id < int32_t(logits.size()); id++) {
    float& value = logits[size_t(id)];
    auto has = [&](const Tokens& ids) {
      return std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    bool banned = rules.allowed.has_value() && !has(*rules.allowed);
    if (int32_t(tokens.size()) < rules.stops_from && has(rules.stops)) banned = true;
    for (const Tokens& word : rules.bad_words) {
      if (word.back() == id && ends_with(rules, tokens, word)) banned = true;
    }
    if (banned) value = -kInf;
    for (auto [biased, bias] : rules.biases) {
      if (biased == id) value += bias;
    }
    auto generated = tokens.begin() + std::min<int64_t>(rules.num_prompt, int64_t(tokens.size()));
    auto count = std::count(generated, tokens.end(), id);
    if (has(tokens)) value = value > 0 ? value / rules.repetition : value * rules.repetition;
    value -= rules.frequency * float(count);
    if (count > 0) value -= rules.presence;
  }
  return logits;
}

struct Row {
  Rules rules;
  Tokens tokens, record;
  SampleParams params = greedy();
};

// The history of a batch's rows on separate pages, in a pool filled with other tokens and invalid
// ids.
class PagedHistory {
 public:
  PagedHistory(const std::vector<const Row*>& rows, int64_t page_size, uint64_t seed)
      : page_size_(page_size) {
    Random random(seed);
    for (const Row* row : rows) num_pages_ += pages_of(*row);
    num_pages_ += 3;
    std::vector<int32_t> free(static_cast<size_t>(num_pages_));
    std::iota(free.begin(), free.end(), 0);
    for (size_t i = free.size(); i > 1; i--) {
      std::swap(free[i - 1], free[size_t(random.below(int(i)))]);
    }
    for (int64_t slot = 0; slot < num_pages_ * page_size; slot++) {
      const int32_t garbage[] = {-1, INT_MIN, INT_MAX, random.below(int(kFewTokens))};
      history_.push_back(garbage[slot % 4]);
    }
    for (const Row* row : rows) add(*row, free);
  }

  RowRules rules_of(size_t index, const Row& row) const {
    return {row.record.data(), tables_[index].data(), history_.data(), page_size_,
            int64_t(row.tokens.size())};
  }

 private:
  int64_t pages_of(const Row& row) const {
    return ceil_div(int64_t(row.tokens.size()), page_size_) + 1;
  }
  void add(const Row& row, std::vector<int32_t>& free) {
    Tokens table(free.end() - pages_of(row), free.end());
    free.resize(free.size() - table.size());
    for (size_t i = 0; i < row.tokens.size(); i++) {
      int64_t page = table[i / size_t(page_size_)];
      history_[size_t(page * page_size_ + int64_t(i) % page_size_)] = row.tokens[i];
    }
    tables_.push_back(table);
  }

  int64_t page_size_, num_pages_ = 0;
  Tokens history_;
  std::vector<Tokens> tables_;
};

// A row without a record has no rules.
template <class T>
Tokens choose_with_rules(const Context& context, Head<T>& head, const std::vector<T>& x,
                    const std::vector<const Row*>& rows, size_t threads, int64_t page_size = 16) {
  PagedHistory history(rows, page_size, rows.size() + threads);
  std::vector<SampleParams> params;
  for (size_t i = 0; i < rows.size(); i++) {
    params.push_back(rows[i]->params);
    if (!rows[i]->record.empty()) params.back().rules = history.rules_of(i, *rows[i]);
  }
  return choose(context, head, x, params, threads);
}

// Each rule is present in about half of the rows; tokens are drawn from the most likely ones, so
// that rules change the result.
Row random_row(Random& random, const std::vector<float>& logits) {
  std::vector<int> best = kept_tokens(logits, greedy());
  auto likely = [&] { return int32_t(best[size_t(random.below(12))]); };
  auto coin = [&] { return random.below(2) == 0; };
  auto draw = [&](int most) {
    Tokens tokens;
    for (int n = random.below(most + 1); n > 0; n--) tokens.push_back(likely());
    return tokens;
  };
  Row row;
  row.tokens = draw(30);
  Rules& rules = row.rules;
  rules.num_prompt = random.below(int(row.tokens.size()) + 1);
  if (coin()) rules.presence = 0.5f + float(random.below(3));
  if (coin()) rules.frequency = 0.25f * float(1 + random.below(4)) * (coin() ? 1.0f : -1.0f);
  if (coin()) rules.repetition = coin() ? 1.5f : 0.75f;
  if (coin()) rules.stops = {int32_t(best[0]), likely(), likely()};
  rules.stops_from = int32_t(row.tokens.size()) + random.below(3) - 1;
  if (coin()) {
    for (int i = 0; i < 5; i++) rules.biases.push_back({best[size_t(3 * i + random.below(3))], 0});
    for (auto& bias : rules.biases) bias.second = float(random.below(9) - 4);
  }
  for (int n = coin() ? 4 : 0; n > 0; n--) {
    int64_t tail = random.below(std::min(4, int(row.tokens.size()) + 1));
    Tokens word(row.tokens.end() - tail, row.tokens.end());
    word.push_back(n == 4 ? int32_t(best[0]) : likely());
    rules.bad_words.push_back(word);
  }
  if (random.below(4) == 0) {
    Tokens allowed(best.begin() + 1, best.begin() + 9);
    rules.allowed = allowed;
  }
  row.record = encode(rules, int64_t(logits.size()));
  return row;
}

template <class T>
struct RuleCases {
  Head<T> head;
  std::vector<T> x;
  std::vector<Row> rows;
  std::vector<std::vector<float>> logits;

  RuleCases(const Context& context, int count, bool is_sampled)
      : head(context, 0.5f, kFewTokens), x(static_cast<size_t>(count * kWidth)) {
    Random random(71);
    x = random_values<T>(random, count * kWidth);
    std::vector<SampleParams> params = many_params(count);
    for (int r = 0; r < count; r++) {
      logits.push_back(logits_of(context, head, x.data() + r * kWidth));
      rows.push_back(random_row(random, logits.back()));
      if (is_sampled) rows.back().params = params[size_t(r)];
    }
  }

  std::vector<const Row*> all() const {
    std::vector<const Row*> pointers;
    for (const Row& row : rows) pointers.push_back(&row);
    return pointers;
  }
};

int32_t first_best(const std::vector<float>& logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

template <class T>
void check_against_reference(const Context& context, bool is_sampled) {
  const int count = context.quick ? 25 : 120;
  RuleCases<T> cases(context, count, is_sampled);
  Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  for (int r = 0; r < count; r++) {
    const Row& row = cases.rows[size_t(r)];
    std::vector<float> expected = reference_logits(cases.logits[size_t(r)], row.rules, row.tokens);
    int32_t token = out[size_t(r * kSampleColumns)];
    bool has_any = *std::max_element(expected.begin(), expected.end()) > -kInf;
    CHECK(out[size_t(r * kSampleColumns + kColumnState)] ==
          (has_any ? kStateChosen : kStateNoneAllowed));
    if (!has_any) continue;
    if (row.params.temperature > 0) {
      check_sampled(expected, row.params, token);
    } else {
      CHECK(token == first_best(expected));
    }
  }
}

TEST(token_rules_agree_with_a_simple_reference) {
  for (bool is_sampled : {false, true}) {
    check_against_reference<bf16>(context, is_sampled);
    check_against_reference<float>(context, is_sampled);
  }
}

// Negative controls: omitting or misreading any rule changes some row's token.
TEST(an_omitted_or_misread_rule_is_detected) {
  const int count = 120;
  RuleCases<float> cases(context, count, false);
  Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), 0);
  using Change = void (*)(Rules&);
  const Change changes[] = {
      [](Rules& r) { r.presence = 0; },      [](Rules& r) { r.frequency = 0; },
      [](Rules& r) { r.repetition = 1; },    [](Rules& r) { r.num_prompt = 0; },
      [](Rules& r) { r.stops.clear(); },     [](Rules& r) { r.stops_from += 1; },
      [](Rules& r) { r.stops_from -= 1; },   [](Rules& r) { r.biases.clear(); },
      [](Rules& r) { r.bad_words.clear(); }, [](Rules& r) { r.allowed.reset(); },
  };
  for (Change change : changes) {
    int num_changed = 0;
    for (int r = 0; r < count; r++) {
      Rules changed = cases.rows[size_t(r)].rules;
      change(changed);
      std::vector<float> logits =
          reference_logits(cases.logits[size_t(r)], changed, cases.rows[size_t(r)].tokens);
      num_changed += out[size_t(r * kSampleColumns)] != first_best(logits);
    }
    CHECK(num_changed > 0);
  }
}

// The rows as an operation: greedy rows, sampled rows and rows with a target, with and without
// rules. A poisoned row has the poison value in its logits, penalties and biases.
template <class T>
RowOperation operation(const Context& context, RuleCases<T>& cases, int64_t page_size) {
  for (size_t r = 0; r < cases.rows.size(); r++) {
    if (r % 7 == 3) cases.rows[r].record.clear();
    if (r % 11 == 5) cases.rows[r].params.target = int32_t(r % size_t(kFewTokens));
  }
  return {"next_token with rules", kSampleColumns * 4, int(cases.rows.size()),
          [&context, &cases, page_size](const RowBatch& batch) {
            std::vector<T> x = take_rows(batch, cases.x, kWidth);
            std::vector<Row> poisoned;
            poisoned.reserve(batch.rows.size());
            std::vector<const Row*> rows;
            for (const RowContent& content : batch.rows) {
              rows.push_back(&cases.rows[size_t(content.data)]);
              if (!content.is_poisoned) continue;
              poisoned.push_back(*rows.back());
              Rules rules = poisoned.back().rules;
              rules.presence = rules.frequency = rules.repetition = content.poison;
              for (int32_t id = 0; id < kMaxBiases; id++)
                rules.biases.push_back({id, content.poison});
              rules.biases.resize(kMaxBiases);
              poisoned.back().record = encode(rules, kFewTokens);
              rows.back() = &poisoned.back();
            }
            return bytes_of(
                choose_with_rules(context, cases.head, x, rows, batch.threads, page_size));
          }};
}

TEST(rows_with_rules_have_the_same_bits_in_every_batch_position_thread_count_and_page) {
  RuleCases<bf16> narrow(context, context.quick ? 65 : 513, true);
  RuleCases<float> wide(context, context.quick ? 65 : 513, true);
  check_exact(context, operation(context, narrow, 16));
  check_exact(context, operation(context, wide, 48));
}

TEST(tokens_of_rows_with_rules_do_not_depend_on_page_size_or_placement) {
  RuleCases<float> cases(context, 40, true);
  Tokens expected = choose_with_rules(context, cases.head, cases.x, cases.all(), 0, 16);
  for (int64_t page_size : {1, 2, 16, 48, 256}) {
    for (size_t threads = 0; threads < 3; threads++) {
      Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), threads, page_size);
      CHECK(out == expected);
    }
  }
}

// Negative control: find_inexactness detects a row that reads another row's tokens.
TEST(rules_that_read_another_rows_tokens_are_detected) {
  RuleCases<float> cases(context, 33, true);
  RowOperation independent = operation(context, cases, 16), leaking = independent;
  leaking.run = [&](const RowBatch& batch) {
    std::vector<Row> rows;
    std::vector<const Row*> pointers;
    for (const RowContent& content : batch.rows) rows.push_back(cases.rows[size_t(content.data)]);
    for (size_t i = 0; i < rows.size(); i++) {
      const Tokens other = rows[i == 0 ? 0 : i - 1].tokens;
      if (i > 0) rows[i].tokens.insert(rows[i].tokens.end(), other.begin(), other.end());
      pointers.push_back(&rows[i]);
    }
    std::vector<float> x = take_rows(batch, cases.x, kWidth);
    return bytes_of(choose_with_rules(context, cases.head, x, pointers, batch.threads));
  };
  CHECK(find_inexactness(context, independent).empty());
  CHECK(!find_inexactness(context, leaking).empty());
}

TEST(rules_do_not_change_the_top_logprobs) {
  RuleCases<float> cases(context, 30, true);
  std::vector<Row> plain = cases.rows;
  std::vector<const Row*> bare;
  for (size_t r = 0; r < plain.size(); r++) {
    cases.rows[r].params.num_logprobs = plain[r].params.num_logprobs = 20;
    plain[r].record.clear();
    bare.push_back(&plain[r]);
  }
  Tokens with = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  Tokens without = choose_with_rules(context, cases.head, cases.x, bare, 1);
  for (size_t r = 0; r < plain.size(); r++) {
    const int32_t *a = with.data() + r * kSampleColumns, *b = without.data() + r * kSampleColumns;
    CHECK(same_bits(a + kColumnTop, b + kColumnTop, kSampleColumns - kColumnTop));
  }
}

// Lists of maximum length: 300 biases, 192 stop tokens, and bad words that fill their list.
TEST(lists_of_maximum_length_are_read_completely) {
  RuleCases<float> cases(context, 6, false);
  for (size_t r = 0; r < cases.rows.size(); r++) {
    Row& row = cases.rows[r];
    std::vector<int> best = kept_tokens(cases.logits[r], greedy());
    row.rules = {};
    row.tokens = {7, 8, 9};
    if (r % 3 == 0) {
      for (size_t i = 0; i < kMaxBiases; i++) row.rules.biases.push_back({best[i], -50.0f});
    } else if (r % 3 == 1) {
      row.rules.stops.assign(best.begin(), best.begin() + kMaxStops);
      row.rules.stops_from = 4;
    } else {
      for (size_t i = 0; i < kMaxBadWordTokens / 5; i++) {
        row.rules.bad_words.push_back({7, 8, 9, best[i]});
      }
    }
    row.record = encode(row.rules, kFewTokens);
  }
  const size_t lengths[] = {kMaxBiases, kMaxStops, kMaxBadWordTokens / 5};
  Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  for (size_t r = 0; r < cases.rows.size(); r++) {
    int32_t next = kept_tokens(cases.logits[r], greedy())[lengths[r % 3]];
    CHECK(out[r * kSampleColumns] == next);
  }
}

TEST(a_row_whose_rules_ban_every_token_reports_it_and_other_rows_are_unchanged) {
  RuleCases<float> cases(context, 9, true);
  Tokens clean = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  cases.rows[4].rules.allowed = Tokens{};
  cases.rows[4].record = encode(cases.rows[4].rules, kFewTokens);
  Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  CHECK(out[4 * kSampleColumns + kColumnState] == kStateNoneAllowed);
  CHECK(out[4 * kSampleColumns] == 0);
  CHECK(same_bits(out.data(), clean.data(), 4 * kSampleColumns));
  CHECK(same_bits(out.data() + 5 * kSampleColumns, clean.data() + 5 * kSampleColumns,
                  4 * kSampleColumns));
}

// Invalid records, which no request produces.
std::vector<Tokens> garbage_records() {
  const size_t words = size_t(rule_words(kFewTokens));
  std::vector<Tokens> records;
  for (int32_t word : {-1, 0, 1, INT_MIN, INT_MAX, int32_t(kFewTokens), bits_of(kNaN),
                       bits_of(kInf), bits_of(-kInf), bits_of(1e-40f)}) {
    records.emplace_back(words, word);
  }
  Random random(5);
  for (int i = 0; i < 6; i++) {
    Tokens record;
    for (size_t w = 0; w < words; w++) record.push_back(int32_t(random.next()));
    records.push_back(record);
  }
  for (int32_t num_prompt : {-1, -1000, INT_MIN, INT_MAX, 41}) {
    for (float repetition : {1.0f, 2.0f, 0.0f}) {
      Rules rules;
      rules.num_prompt = num_prompt;
      rules.presence = kNaN;
      rules.repetition = repetition;
      rules.bad_words = {{1, 2, 3}, Tokens(60, -2), {INT_MAX}, {2, 2, 2, 2}};
      records.push_back(encode(rules, kFewTokens));
    }
  }
  return records;
}

TEST(an_invalid_record_or_history_does_not_change_other_rows) {
  RuleCases<float> cases(context, 7, true);
  for (Row& row : cases.rows) row.params.num_logprobs = 5;
  Tokens clean = choose_with_rules(context, cases.head, cases.x, cases.all(), 1);
  const std::vector<Tokens> contexts{
      {}, {-1, INT_MIN, INT_MAX, int32_t(kFewTokens), 3}, Tokens(40, 2), Tokens(300, INT_MAX)};
  for (const Tokens& record : garbage_records()) {
    for (const Tokens& tokens : contexts) {
      cases.rows[3].record = record;
      cases.rows[3].tokens = tokens;
      Tokens out = choose_with_rules(context, cases.head, cases.x, cases.all(), 2);
      const int32_t *mine = out.data() + 3 * kSampleColumns, top = kColumnTop;
      CHECK(mine[kColumnToken] >= 0 && mine[kColumnToken] < kFewTokens);
      CHECK(mine[kColumnState] == kStateChosen || mine[kColumnState] == kStateNoneAllowed);
      CHECK(same_bits(mine + top, clean.data() + 3 * kSampleColumns + top, kSampleColumns - top));
      CHECK(same_bits(out.data(), clean.data(), 3 * kSampleColumns));
      CHECK(
          same_bits(mine + kSampleColumns, clean.data() + 4 * kSampleColumns, 3 * kSampleColumns));
    }
  }
}

}  // namespace
}  // namespace cadenza::tests
