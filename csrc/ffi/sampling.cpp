// FFI wrapper: from the last hidden states to the next tokens.
#include <cstring>
#include <vector>

#include "ffi/buffers.h"

namespace cadenza::xla_ffi {

namespace {

struct RowData {
  Any temperature, top_k, top_p, min_p, keys, num_logprobs, bias, bias_rows;
};

SampleParams params_of_row(const RowData& rows, int64_t row, int64_t vocab) {
  SampleParams params{};
  params.temperature = data<float>(rows.temperature)[row];
  params.top_k = int32(rows.top_k)[row];
  params.top_p = data<float>(rows.top_p)[row];
  params.min_p = data<float>(rows.min_p)[row];
  params.num_logprobs = int32(rows.num_logprobs)[row];
  std::memcpy(params.key, data<uint32_t>(rows.keys) + 2 * row, sizeof(params.key));
  if (rows.bias.element_count() == 0) return params;
  int64_t bias_row = int32(rows.bias_rows)[row];
  require(bias_row < dim(rows.bias, 0), "a bias row is outside the bias array");
  if (bias_row >= 0) params.bias = data<float>(rows.bias) + bias_row * vocab;
  return params;
}

void check(const RowData& rows, int64_t count, int64_t vocab) {
  const Any* floats[] = {&rows.temperature, &rows.top_p, &rows.min_p};
  for (const Any* each : floats) {
    require(each->element_type() == ffi::F32 && int64_t(each->element_count()) >= count,
            "temperature, top_p and min_p must be f32 [L]");
  }
  const Any* ints[] = {&rows.top_k, &rows.num_logprobs, &rows.bias_rows};
  for (const Any* each : ints) {
    require(each->element_type() == ffi::S32 && int64_t(each->element_count()) >= count,
            "top_k, num_logprobs and bias_rows must be int32 [L]");
  }
  require(rows.keys.element_type() == ffi::U32 && int64_t(rows.keys.element_count()) >= 2 * count,
          "keys must be uint32 [L, 2]");
  require(rows.bias.element_count() == 0 ||
              (rows.bias.element_type() == ffi::F32 && dim(rows.bias, 1) == vocab),
          "bias must be f32 [B, V]");
}

ffi::Error next_token_call(Any x, Any head, Any count, Any temperature, Any top_k, Any top_p,
                           Any min_p, Any keys, Any num_logprobs, Any bias, Any bias_rows,
                           AnyResult out, int64_t vocab) {
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
    require(dim(x, 0) >= task.product.rows, "x has too few rows");
    require_packed(head, dtype, vocab, task.product.k);
    require(out->element_type() == ffi::S32 && dim(*out, 1) == kSampleColumns,
            "the result must be int32 [L, 44]");
    std::memset(task.out, 0, out->size_bytes());
    RowData rows{temperature, top_k, top_p, min_p, keys, num_logprobs, bias, bias_rows};
    check(rows, task.product.rows, vocab);
    std::vector<SampleParams> params;
    params.reserve(size_t(task.product.rows));
    for (int64_t row = 0; row < task.product.rows; row++) {
      params.push_back(params_of_row(rows, row, vocab));
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
                                  .Ret<Any>()
                                  .Attr<int64_t>("vocab"));
#pragma GCC visibility pop

}  // namespace cadenza::xla_ffi
