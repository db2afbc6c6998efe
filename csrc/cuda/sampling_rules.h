// A row's token rules, applied to one slice of its logits.
//
// Each slice looks through all of the row's lists and tokens for its own, so that nothing but the
// slice is written. Ids outside the vocabulary are in no slice.
#pragma once

#include "core/rules.h"
#include "cuda/sampling.h"

namespace cadenza::cuda {

// The values of a slice, and how often each of its tokens has been generated.
struct RuledSlice {
  float values[kSlice];
  int counts[kSlice];
  unsigned char is_in_context[kSlice];
};

class SliceRules {
 public:
  __device__ SliceRules(const RuleMemory& memory, const Settings& settings, int begin, RuledSlice& slice)
      : record_(settings.record),
        pages_(memory.page_table + int64_t(settings.row) * memory.pages),
        memory_(memory),
        length_(settings.length),
        num_prompt_(max(0, min(settings.record[kRuleNumPrompt], settings.length))),
        begin_(begin),
        slice_(slice) {}

  // Called by all threads of the block, each of which has filled its elements of the slice.
  __device__ void apply() {
    __syncthreads();
    ban_bad_words();
    if (length_ < record_[kRuleStopsFrom]) {
      for (int i = int(threadIdx.x); i < kMaxStops; i += int(blockDim.x)) ban(record_[kRuleStops + i]);
    }
    __syncthreads();
    add_biases();
    if (has_penalties()) count_tokens();
    __syncthreads();
    for (int at = int(threadIdx.x); at < kSlice; at += int(blockDim.x)) {
      if (has_penalties() && slice_.is_in_context[at]) penalise(at);
      if (record_[kRuleHasMask] > 0 && !is_allowed(begin_ + at)) slice_.values[at] = -kInfinite;
    }
  }

 private:
  static constexpr float kInfinite = __builtin_inff();

  __device__ float number(int word) const { return as_bits<float>(record_[word]); }
  __device__ float presence() const { return number(kRulePresence); }
  __device__ float frequency() const { return number(kRuleFrequency); }
  __device__ float repetition() const { return number(kRuleRepetition); }
  __device__ bool has_penalties() const {
    return presence() != 0.0f || frequency() != 0.0f || repetition() != 1.0f;
  }

  // The token's place in the slice; -1 if it is in another.
  __device__ int place(int token) const {
    return token >= begin_ && token - begin_ < kSlice ? token - begin_ : -1;
  }
  __device__ void ban(int token) {
    const int at = place(token);
    if (at >= 0) slice_.values[at] = -kInfinite;
  }
  __device__ bool is_allowed(int token) const {
    const int word = int(kRuleMask) + token / 32;
    return word < memory_.record_words && (uint32_t(record_[word]) >> (token % 32) & 1) != 0;
  }

  __device__ int token(int position) const {
    const int page = pages_[position / memory_.page_size];
    if (page < 0 || page >= memory_.history_pages) return -1;
    return memory_.history[int64_t(page) * memory_.page_size + position % memory_.page_size];
  }

  // Bans the last token of each bad word whose other tokens end what was generated.
  __device__ void ban_bad_words() {
    const int32_t* words = record_ + kRuleBadWords;
    for (int end = int(threadIdx.x); end < kMaxBadWordTokens; end += int(blockDim.x)) {
      if (place(words[end]) < 0) continue;
      const bool is_end = end + 1 == kMaxBadWordTokens || words[end + 1] < 0;
      if (is_end && ends_with(words, end)) ban(words[end]);
    }
  }
  __device__ bool ends_with(const int32_t* words, int end) const {
    for (int back = 1; back <= end && words[end - back] >= 0; back++) {
      if (length_ - back < num_prompt_ || token(length_ - back) != words[end - back]) return false;
    }
    return true;
  }

  __device__ void add_biases() {
    for (int i = int(threadIdx.x); i < kMaxBiases; i += int(blockDim.x)) {
      const int at = place(record_[kRuleBiasIds + i]);
      if (at >= 0) slice_.values[at] += number(int(kRuleBiasValues) + i);
    }
  }

  // Counts the slice's tokens in the context; only repetition looks at the prompt's.
  __device__ void count_tokens() {
    const int start = repetition() == 1.0f ? num_prompt_ : 0;
#pragma unroll 4
    for (int position = start + int(threadIdx.x); position < length_; position += int(blockDim.x)) {
      const int at = place(token(position));
      if (at < 0) continue;
      slice_.is_in_context[at] = 1;
      if (position >= num_prompt_) atomicAdd(&slice_.counts[at], 1);
    }
  }
  __device__ void penalise(int at) {
    float value = slice_.values[at];
    const int count = slice_.counts[at];
    value = value > 0.0f ? value / repetition() : value * repetition();
    value -= frequency() * float(count);
    if (count > 0) value -= presence();
    slice_.values[at] = value;
  }

  const int32_t* record_;
  const int32_t* pages_;
  const RuleMemory& memory_;
  const int length_, num_prompt_, begin_;
  RuledSlice& slice_;
};

}  // namespace cadenza::cuda
