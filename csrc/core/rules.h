// Layout of a row's token rules as packed by `batch/token_rules.py`: int32 words; floats are stored
// as their bits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cadenza {

// Indices of the header words, then the start of each list. Unused list entries are -1, and a -1
// precedes each bad word.
constexpr int kRuleNumPrompt = 0, kRuleStopsFrom = 1, kRulePresence = 2, kRuleFrequency = 3;
constexpr int kRuleRepetition = 4, kRuleHasMask = 5;
constexpr int64_t kMaxBiases = 300, kMaxStops = 192, kMaxBadWordTokens = 1000;
constexpr int64_t kRuleBiasIds = 16, kRuleBiasValues = kRuleBiasIds + kMaxBiases;
constexpr int64_t kRuleStops = kRuleBiasValues + kMaxBiases;
constexpr int64_t kRuleBadWords = kRuleStops + kMaxStops;
constexpr int64_t kRuleMask = kRuleBadWords + kMaxBadWordTokens;

inline int64_t rule_words(int64_t vocab) { return kRuleMask + (vocab + 31) / 32; }

// One row's rules, and where to read the tokens that precede the sampled position.
struct RowRules {
  const int32_t* record;      // [W], or null: no rules
  const int32_t* page_table;  // [P]
  const int32_t* history;     // [slots]: the token at each
  int64_t page_size;
  int64_t length;  // number of preceding tokens

  // Prompt tokens among them, clamped because a record may hold any value.
  int64_t num_prompt() const { return std::clamp<int64_t>(record[kRuleNumPrompt], 0, length); }
  int32_t token(int64_t position) const {
    return history[page_table[position / page_size] * page_size + position % page_size];
  }
};

}  // namespace cadenza
