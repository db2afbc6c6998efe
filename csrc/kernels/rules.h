// A row's token rules, applied to its logits in place and undone afterwards.
//
// The cost depends on the row's tokens and lists, not on the vocabulary. Token ids outside the
// vocabulary are ignored, so an invalid record or history affects its own row only.
#pragma once

#include <algorithm>

#include "core/arena.h"
#include "core/rules.h"
#include "kernels/math.h"

namespace cadenza::CADENZA_ISA {

inline float float_of(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// A row's logits with an undo log of every change.
class UndoableLogits {
 public:
  UndoableLogits(float* logits, int64_t vocab, int64_t max_changes, Arena& arena)
      : logits_(logits), vocab_(vocab), saved_(arena.take<Saved>(max_changes)) {}

  bool has(int32_t token) const { return token >= 0 && token < vocab_; }
  float get(int32_t token) const { return logits_[token]; }
  void set(int32_t token, float value) {
    saved_[count_++] = {token, logits_[token]};
    logits_[token] = value;
  }
  void ban(int32_t token) {
    if (has(token)) set(token, -__builtin_inff());
  }
  void restore() {
    while (count_ > 0) {
      count_--;
      logits_[saved_[count_].token] = saved_[count_].value;
    }
  }

 private:
  struct Saved {
    int32_t token;
    float value;
  };
  float* logits_;
  int64_t vocab_;
  Saved* saved_;
  int64_t count_ = 0;
};

// Upper bound on the number of changes that a row's rules make.
inline int64_t max_rule_changes(const RowRules& rules) {
  return kMaxBadWordTokens + kMaxStops + kMaxBiases + rules.length;
}

// Whether the last `count` generated tokens equal the `count` tokens of a bad word before `end`.
inline bool matches_history(const RowRules& rules, const int32_t* end, int64_t count) {
  if (rules.length - count < rules.num_prompt()) return false;
  for (int64_t back = 1; back <= count; back++) {
    if (rules.token(rules.length - back) != end[-back]) return false;
  }
  return true;
}

inline void ban_bad_words(const RowRules& rules, UndoableLogits& logits) {
  const int32_t* words = rules.record + kRuleBadWords;
  int64_t before = 0;  // tokens of the word before words[i]
  for (int64_t i = 0; i < kMaxBadWordTokens; i++) {
    if (words[i] < 0) {
      before = 0;
      continue;
    }
    bool is_end = i + 1 == kMaxBadWordTokens || words[i + 1] < 0;
    if (is_end && matches_history(rules, words + i, before)) logits.ban(words[i]);
    before++;
  }
}

inline void add_biases(const RowRules& rules, UndoableLogits& logits) {
  const int32_t* ids = rules.record + kRuleBiasIds;
  for (int64_t i = 0; i < kMaxBiases && ids[i] >= 0; i++) {
    float bias = float_of(rules.record[kRuleBiasValues + i]);
    if (logits.has(ids[i])) logits.set(ids[i], logits.get(ids[i]) + bias);
  }
}

// Number of times each token of a context was generated. A hash table with open addressing, so its
// cost depends on the context's length, not on the vocabulary.
struct TokenCounts {
  struct Entry {
    int32_t token;  // -1: free
    int32_t count;
  };
  Entry* entries;
  uint32_t size;  // a power of two

  TokenCounts(int64_t tokens, Arena& arena) : size(64) {
    while (int64_t(size) < 2 * tokens) size *= 2;
    entries = arena.take<Entry>(size);
    std::fill(entries, entries + size, Entry{-1, 0});
  }
  void add(int32_t token, int32_t count) {
    uint32_t at = (uint32_t(token) * 0x9E3779B9u >> 7) & (size - 1);
    while (entries[at].token >= 0 && entries[at].token != token) at = (at + 1) & (size - 1);
    entries[at].token = token;
    entries[at].count += count;
  }
};

inline void penalise(const RowRules& rules, UndoableLogits& logits, Arena& arena) {
  float presence = float_of(rules.record[kRulePresence]);
  float frequency = float_of(rules.record[kRuleFrequency]);
  float repetition = float_of(rules.record[kRuleRepetition]);
  if (presence == 0.0f && frequency == 0.0f && repetition == 1.0f) return;
  const int64_t num_prompt = rules.num_prompt();
  const int64_t start = repetition == 1.0f ? num_prompt : 0;  // only repetition counts the prompt
  TokenCounts counts(rules.length - start, arena);
  for (int64_t position = start; position < rules.length; position++) {
    int32_t token = rules.token(position);
    if (logits.has(token)) counts.add(token, position >= num_prompt);
  }
  for (uint32_t i = 0; i < counts.size; i++) {
    const TokenCounts::Entry& entry = counts.entries[i];
    if (entry.token < 0) continue;
    float value = logits.get(entry.token);
    value = value > 0.0f ? value / repetition : value * repetition;
    value -= frequency * float(entry.count);
    if (entry.count > 0) value -= presence;
    logits.set(entry.token, value);
  }
}

// Applies all rules except the mask, which take_allowed applies when it collects the candidates.
inline void apply_rules(const RowRules& rules, UndoableLogits& logits, Arena& arena) {
  ban_bad_words(rules, logits);
  const int32_t* stops = rules.record + kRuleStops;
  if (rules.length < rules.record[kRuleStopsFrom]) {
    for (int64_t i = 0; i < kMaxStops && stops[i] >= 0; i++) logits.ban(stops[i]);
  }
  add_biases(rules, logits);
  penalise(rules, logits, arena);
}

}  // namespace cadenza::CADENZA_ISA
