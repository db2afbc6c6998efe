// FFI target for a sequence of operations: one call of XLA's for a whole step.
//
// XLA takes one to three microseconds between two custom calls, as a step reads more weights than
// the caches hold; a decode step of one token has 200 operations.
#include "ffi/program.h"

namespace cadenza::xla_ffi {

namespace {

// cadenza_program: the operands of its operations in any order; results in any order, the last one
// u8 scratch memory. Attributes: arrays i64, three words and the dimensions for each array in the
// scratch memory (Values); operations i64, for each operation its index in kOperations, its number
// of parameters, and a word for each parameter: operands, results, attributes; is_portable, whether
// the kernels are those of the portable class.
//
// An operation may write into the array of one of its operands; the caller sees to it that nothing
// reads what was there before.
ffi::Error program_call(ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Span<const int64_t> arrays, ffi::Span<const int64_t> operations,
                        bool is_portable) {
  ffi::Error error = ffi::Error::Success();
  takes_portable_kernels = is_portable;
  ffi::Error failed = guarded("cadenza_program", [&] {
    require(rets.size() > 0, "the scratch memory is missing");
    Values values(args, rets);
    values.add_scratch(arrays);
    error = run_operations(values, operations);
  });
  return failed.failure() ? failed : error;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" const char* cadenza_program_operations() { return program_operations(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(CadenzaProgram, program_call,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("arrays")
                                  .Attr<ffi::Span<const int64_t>>("operations")
                                  .Attr<bool>("is_portable"));
#pragma GCC visibility pop

}  // namespace cadenza::xla_ffi
