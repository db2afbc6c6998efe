// A row's token rules as `core/token_rules.py` writes them: int32 words, floats as their bits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cadenza {

// Words of the header, then where each list begins. -1 fills a list behind its end, and stands
// before each bad word.
constexpr int kRuleNumPrompt = 0, kRuleStopsFrom = 1, kRulePresence = 2, kRuleFrequency = 3;
constexpr int kRuleRepetition = 4, kRuleHasMask = 5;
constexpr int64_t kMaxBiases = 300, kMaxStops = 192, kMaxBadWordTokens = 1000;
constexpr int64_t kRuleBiasIds = 16, kRuleBiasValues = kRuleBiasIds + kMaxBiases;
constexpr int64_t kRuleStops = kRuleBiasValues + kMaxBiases;
constexpr int64_t kRuleBadWords = kRuleStops + kMaxStops;
constexpr int64_t kRuleMask = kRuleBadWords + kMaxBadWordTokens;

inline int64_t rule_words(int64_t vocab) { return kRuleMask + (vocab + 31) / 32; }

// One row's rules, and where the tokens lie that came before the choice.
struct RowRules {
  const int32_t* record;      // [W], or null: no rules
  const int32_t* page_table;  // [P]
  const int32_t* history;     // [slots]: the token at each
  int64_t page_size;
  int64_t length;  // tokens before the choice

  // Of the tokens before the choice; never more than there are, whatever the record says.
  int64_t num_prompt() const { return std::clamp<int64_t>(record[kRuleNumPrompt], 0, length); }
  int32_t token(int64_t position) const {
    return history[page_table[position / page_size] * page_size + position % page_size];
  }
};

}  // namespace cadenza
