// Logit rows as declared in `core/step_schema.py` (`LogitInputs`), stored column by column: one
// array of 32-bit words for each field.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/rules.h"

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
  kTopNSigma,
  kHasRules,
  kNumLogitColumns
};

// The declared field names of the columns above. The Python side compares them to reject a library
// of another version.
constexpr const char* kLogitColumnNames =
    "token_indices rows positions targets keys keys num_logprobs temperature top_k top_p min_p "
    "top_n_sigma has_rules";

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

// Sampling parameters of one logit row.
struct SampleParams {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  uint32_t key[2];
  int32_t num_logprobs;
  int32_t target = -1;  // >= 0: report this token's logprob instead of sampling
  float top_n_sigma = 0;
  RowRules rules{};
};

// All fields except `rules`, which are stored in separate buffers.
inline SampleParams params_of(const LogitRows& rows, int64_t row) {
  SampleParams params{};
  params.temperature = rows.number(kTemperature, row);
  params.top_k = rows.whole(kTopK, row);
  params.top_p = rows.number(kTopP, row);
  params.min_p = rows.number(kMinP, row);
  params.key[0] = uint32_t(rows.whole(kKeyLow, row));
  params.key[1] = uint32_t(rows.whole(kKeyHigh, row));
  params.num_logprobs = rows.whole(kNumLogprobs, row);
  params.target = rows.whole(kTarget, row);
  params.top_n_sigma = rows.number(kTopNSigma, row);
  return params;
}

}  // namespace cadenza
