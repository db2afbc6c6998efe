// Logit rows as `core/step_schema.py` declares them (`LogitInputs`): one column of 32-bit words for
// each field, one column behind the other.
#pragma once

#include <cstdint>
#include <cstring>

namespace cadenza {

enum LogitColumn : int64_t {
  kTokenIndex,
  kRow,
  kPosition,
  kTarget,
  kKeyLow,
  kKeyHigh,
  kNumLogprobs,
  kTemperature,
  kTopK,
  kTopP,
  kMinP,
  kHasRules,
  kNumLogitColumns
};

// The declaration's names of the columns above: a library of another version is known by them.
constexpr const char* kLogitColumnNames =
    "token_indices rows positions targets keys keys num_logprobs temperature top_k top_p min_p "
    "has_rules";

struct LogitRows {
  const int32_t* words;  // [kNumLogitColumns, stride]
  int64_t stride;

  int32_t whole(LogitColumn column, int64_t row) const { return words[column * stride + row]; }
  float number(LogitColumn column, int64_t row) const {
    float value;
    std::memcpy(&value, words + column * stride + row, sizeof(value));
    return value;
  }
};

}  // namespace cadenza
