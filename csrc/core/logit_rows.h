// Logit rows as declared in `batch/step_schema.py` (`LogitInputs`), stored column by column: one
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
  kRuleRecord,
  kNumLogitColumns
};

// The declared field names of the columns above. The Python side compares them to reject a library
// of another version.
constexpr const char* kLogitColumnNames =
    "token_indices rows positions targets keys keys num_logprobs temperature top_k top_p min_p "
    "top_n_sigma rule_record";

struct LogitRows {
  const int32_t* words;  // [kNumLogitColumns, stride]
  int64_t stride;

  int32_t int_at(LogitColumn column, int64_t row) const { return words[column * stride + row]; }
  float float_at(LogitColumn column, int64_t row) const {
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
  params.temperature = rows.float_at(kTemperature, row);
  params.top_k = rows.int_at(kTopK, row);
  params.top_p = rows.float_at(kTopP, row);
  params.min_p = rows.float_at(kMinP, row);
  params.key[0] = uint32_t(rows.int_at(kKeyLow, row));
  params.key[1] = uint32_t(rows.int_at(kKeyHigh, row));
  params.num_logprobs = rows.int_at(kNumLogprobs, row);
  params.target = rows.int_at(kTarget, row);
  params.top_n_sigma = rows.float_at(kTopNSigma, row);
  return params;
}

}  // namespace cadenza
