// FFI wrapper: from the last hidden states to the next tokens.
#include <cstring>
#include <vector>

#include "ffi/buffers.h"

namespace cadenza::xla_ffi {

namespace {

struct RowData {
  Any temperature, top_k, top_p, min_p, keys, num_logprobs, has_rules, targets;
};

// What rows remember: their rules and their tokens. Empty arrays stand for "no row has rules".
struct RowMemory {
  Any records, rows, lengths, page_table, history;
  int64_t page_size;

  bool is_there() const { return records.element_count() > 0; }
};

RowRules rules_of_row(const RowMemory& memory, int64_t index) {
  const int64_t row = int32(memory.rows)[index], length = int32(memory.lengths)[index];
  const int64_t words = dim(memory.records, 1), pages = dim(memory.page_table, 1);
  require(row >= 0 && row < dim(memory.records, 0), "a logit row's row is out of range");
  require(length >= 0 && length <= pages * memory.page_size, "a context is longer than its pages");
  RowRules rules{int32(memory.records) + row * words, int32(memory.page_table) + row * pages,
                 int32(memory.history), memory.page_size, length};
  const int64_t num_pages = int64_t(memory.history.element_count()) / memory.page_size;
  for (int64_t page = 0; page * memory.page_size < length; page++) {
    require(rules.page_table[page] >= 0 && rules.page_table[page] < num_pages,
            "a page of a context is out of range");
  }
  return rules;
}

SampleParams params_of_row(const RowData& rows, const RowMemory& memory, int64_t row) {
  SampleParams params{};
  params.temperature = data<float>(rows.temperature)[row];
  params.top_k = int32(rows.top_k)[row];
  params.top_p = data<float>(rows.top_p)[row];
  params.min_p = data<float>(rows.min_p)[row];
  params.num_logprobs = int32(rows.num_logprobs)[row];
  params.target = int32(rows.targets)[row];
  std::memcpy(params.key, data<uint32_t>(rows.keys) + 2 * row, sizeof(params.key));
  if (has_fault(Fault::kRowKey)) params.key[0] = uint32_t(row);
  if (memory.is_there() && int32(rows.has_rules)[row] > 0) params.rules = rules_of_row(memory, row);
  return params;
}

void check(const RowData& rows, int64_t count, int64_t vocab) {
  const Any* floats[] = {&rows.temperature, &rows.top_p, &rows.min_p};
  for (const Any* each : floats) {
    require(each->element_type() == ffi::F32 && int64_t(each->element_count()) >= count,
            "temperature, top_p and min_p must be f32 [L]");
  }
  const Any* ints[] = {&rows.top_k, &rows.num_logprobs, &rows.has_rules, &rows.targets};
  for (const Any* each : ints) {
    require(each->element_type() == ffi::S32 && int64_t(each->element_count()) >= count,
            "top_k, num_logprobs, has_rules and targets must be int32 [L]");
  }
  require(rows.keys.element_type() == ffi::U32 && int64_t(rows.keys.element_count()) >= 2 * count,
          "keys must be uint32 [L, 2]");
  for (int64_t row = 0; row < count; row++) {
    require(int32(rows.targets)[row] < vocab, "a target is no token of the vocabulary");
  }
}

void check(const RowMemory& memory, int64_t count, int64_t vocab) {
  if (!memory.is_there()) return;
  require(memory.page_size > 0, "the page size must be above 0");
  require(dim(memory.records, 1) == rule_words(vocab), "rules must be int32 [R, W]");
  require(dim(memory.page_table, 0) == dim(memory.records, 0), "page_table must be int32 [R, P]");
  require(int64_t(memory.rows.element_count()) >= count &&
              int64_t(memory.lengths.element_count()) >= count,
          "rows and lengths must be int32 [L]");
}

ffi::Error next_token_call(Any x, Any head, Any count, Any temperature, Any top_k, Any top_p,
                           Any min_p, Any keys, Any num_logprobs, Any has_rules, Any targets,
                           Any records, Any logit_rows, Any lengths, Any page_table, Any history,
                           AnyResult out, int64_t vocab, float divisor, float soft_cap,
                           int64_t page_size) {
  return guarded("cadenza_next_token", [&] {
    ProfileScope profile(Op::kNextToken);
    DType dtype = element_type(x);
    NextTokenTask task{};
    task.product.rows = true_count(count, dim(*out, 0));
    task.product.n = vocab;
    task.product.k = dim(x, 1);
    task.product.x = x.untyped_data();
    task.product.w = head.untyped_data();
    task.out = static_cast<int32_t*>(out->untyped_data());
    task.shape = {divisor, soft_cap};
    require(divisor > 0 && soft_cap >= 0, "the divisor must be above 0, the soft cap at least 0");
    require(dim(x, 0) >= task.product.rows, "x has too few rows");
    require_packed(head, dtype, vocab, task.product.k);
    require(out->element_type() == ffi::S32 && dim(*out, 1) == kSampleColumns,
            "the result must be int32 [L, 44]");
    std::memset(task.out, 0, out->size_bytes());
    RowData rows{temperature, top_k, top_p, min_p, keys, num_logprobs, has_rules, targets};
    RowMemory memory{records, logit_rows, lengths, page_table, history, page_size};
    check(rows, task.product.rows, vocab);
    check(memory, task.product.rows, vocab);
    std::vector<SampleParams> params;
    params.reserve(size_t(task.product.rows));
    for (int64_t row = 0; row < task.product.rows; row++) {
      params.push_back(params_of_row(rows, memory, row));
    }
    task.params = params.data();
    if (profile.is_on()) {
      profile.reads(int64_t(head.size_bytes()));
      profile.reads(task.product.rows * task.product.k * bytes_of(dtype));
    }
    next_token(runtime(), dtype, task);
  });
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(CadenzaNextToken, next_token_call,
                              ffi::Ffi::Bind()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Ret<Any>()
                                  .Attr<int64_t>("vocab")
                                  .Attr<float>("divisor")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("page_size"));
#pragma GCC visibility pop

}  // namespace cadenza::xla_ffi
