// LM head and sampling as XLA calls them. Conventions: csrc/README.md.
#include <cstring>
#include <vector>

#include "core/logit_rows.h"
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

namespace {

// Records of token rules and the token history; empty if no row has rules.
struct RuleBuffers {
  Any records, page_table, history;
  int64_t page_size;

  bool has_records() const { return records.element_count() > 0; }
};

RowRules rules_of(const LogitRows& rows, const RuleBuffers& buffers, int64_t index) {
  const int64_t row = rows.int_at(kRow, index), length = rows.int_at(kPosition, index);
  const int64_t record = rows.int_at(kRuleRecord, index);
  const int64_t words = dim(buffers.records, 1), pages = dim(buffers.page_table, 1);
  require(record < dim(buffers.records, 0), "a logit row refers to rules outside the records");
  require(row >= 0 && row < dim(buffers.page_table, 0),
          "a logit row refers to a row outside the page table");
  require(length >= 0 && length <= pages * buffers.page_size,
          "a logit row's position is beyond its row's pages");
  RowRules rules{int32(buffers.records) + record * words, int32(buffers.page_table) + row * pages,
                 int32(buffers.history), buffers.page_size, length};
  const int64_t num_pages = int64_t(buffers.history.element_count()) / buffers.page_size;
  for (int64_t page = 0; page * buffers.page_size < length; page++) {
    require(rules.page_table[page] >= 0 && rules.page_table[page] < num_pages,
            "page_table refers to a page outside the history");
  }
  return rules;
}

SampleParams params_of(const LogitRows& rows, const RuleBuffers& buffers, int64_t index) {
  SampleParams params = params_of(rows, index);
  if (has_fault(Fault::kRowKey)) params.key[0] = uint32_t(index);
  if (buffers.has_records() && rows.int_at(kRuleRecord, index) >= 0) {
    params.rules = rules_of(rows, buffers, index);
  }
  return params;
}

LogitRows checked_rows(const Any& columns, int64_t count, int64_t vocab) {
  require(columns.element_type() == ffi::S32 && dim(columns, 0) == kNumLogitColumns &&
              dim(columns, 1) >= count,
          "the logit rows must be int32 [columns, L]");
  LogitRows rows{int32(columns), dim(columns, 1)};
  for (int64_t index = 0; index < count; index++) {
    require(rows.int_at(kTarget, index) < vocab, "a target is outside the vocabulary");
  }
  return rows;
}

void check(const RuleBuffers& buffers, int64_t vocab) {
  if (!buffers.has_records()) return;
  require(buffers.page_size > 0, "the page size must be above 0");
  require(dim(buffers.records, 1) == rule_words(vocab), "rules must be int32 [L, W]");
}

}  // namespace

// cadenza_next_token: x act [L, E]; head packed; count; logit rows [columns, L]
// (core/logit_rows.h); records [L, W] or [0]; page_table [R, P]; history [slots]. Result int32 [L,
// 44]. Attributes: vocab i64; divisor f32, 1 none; soft_cap f32, 0 none; page_size i64; banned i64, a
// token that no row chooses, -1 none.
//
// Logits are divided by divisor, then capped: soft_cap · tanh(logit / soft_cap). Whether all are
// finite is checked before, because the cap would map infinities to finite values. Columns of the
// result: token, state (0 a logit is not finite, 1 token selected, 2 the rules ban every token),
// logprob bits, rank, 20 ids, 20 logprob bits; the last four groups are zero if num_logprobs < 0.
// Logprobs are computed from the logits before the rules. The logits of a greedy row without rules,
// target and logprobs are not written to memory.
void execute(const calls::next_token& c) {
  ProfileScope profile(c.kOp);
  ProductTypes types = product_types(c.x, c.head);
  NextTokenTask task{};
  task.product.rows = true_count(c.count, dim(c.out, 0));
  task.product.n = c.vocab;
  task.product.k = dim(c.x, 1);
  task.product.x = c.x.untyped_data();
  task.product.w = c.head.untyped_data();
  task.out = static_cast<int32_t*>(c.out.untyped_data());
  task.transform = {c.divisor, c.soft_cap};
  task.banned = c.banned;
  require(c.divisor > 0 && c.soft_cap >= 0, "the divisor must be above 0, the soft cap at least 0");
  require(dim(c.x, 0) >= task.product.rows, "x has too few rows");
  require_packed(c.head, c.vocab, task.product.k);
  require(c.out.element_type() == ffi::S32 && dim(c.out, 1) == kSampleColumns,
          "the result must be int32 [L, 44]");
  std::memset(task.out, 0, c.out.size_bytes());
  LogitRows rows = checked_rows(c.columns, task.product.rows, c.vocab);
  RuleBuffers buffers{c.records, c.page_table, c.history, c.page_size};
  check(buffers, c.vocab);
  std::vector<SampleParams> params;
  params.reserve(size_t(task.product.rows));
  for (int64_t row = 0; row < task.product.rows; row++) {
    params.push_back(params_of(rows, buffers, row));
  }
  task.params = params.data();
  if (profile.is_on()) {
    profile.reads(int64_t(c.head.size_bytes()));
    profile.reads(task.product.rows * task.product.k * bytes_of(types.activation));
  }
  next_token(runtime(), types, task);
}

}  // namespace cadenza::xla_ffi
