// FFI target for a program of operations on a GPU, or on the emulation of one: the operations and
// their words are those of the CPU's program (ffi/program.h), their bodies are in this folder.
#include "core/faults.h"
#include "cuda/graphs.h"
#include "cuda/launch.h"
#include "ffi/program.h"

namespace cadenza::xla_ffi {

namespace {

using cuda::context;

// cadenza_cuda_program: as cadenza_program of the CPU. Attributes: arrays and operations likewise;
// row_bound i64, the tokens of a step; workspace_bytes i64, the end of the scratch memory that
// operations share, as cadenza_cuda_workspace measured it.
ffi::Error run_program(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Span<const int64_t> arrays, ffi::Span<const int64_t> operations,
                       int64_t row_bound, int64_t workspace_bytes) {
  ffi::Error error = ffi::Error::Success();
  ffi::Error failed = guarded("cadenza_cuda_program", [&] {
    require(rets.size() > 0, "the scratch memory is missing");
    Values values(args, rets);
    const Any scratch = values.last();
    require(workspace_bytes >= 0 && workspace_bytes <= int64_t(scratch.size_bytes()),
            "the scratch memory is too small for the workspace");
    values.add_scratch(arrays);
    context = {};
    context.stream = stream;
    context.workspace_bytes = size_t(workspace_bytes);
    context.workspace = static_cast<char*>(scratch.untyped_data()) + scratch.size_bytes() - workspace_bytes;
    context.row_bound = row_bound;
    const int64_t bounds[] = {row_bound, workspace_bytes};
    uint64_t hash = cuda::hash_of(std::begin(bounds), std::end(bounds));
    for (const auto& words : {arrays, operations}) hash = cuda::hash_of(words.begin(), words.end(), hash);
#ifdef CADENZA_FAULTS
    const int64_t fault = int64_t(injected_fault.load());
    hash = cuda::hash_of(&fault, &fault + 1, hash);
#endif
    cuda::run_as_graph({hash, values.description()}, [&] {
      error = run_operations(values, operations);
      return !error.failure();
    });
  });
  return failed.failure() ? failed : error;
}

// The arrays of a program by their shapes: `words` holds type, rank and dimensions of each.
std::vector<XLA_FFI_Buffer> buffers_of(const int64_t* words, int64_t num_words) {
  std::vector<XLA_FFI_Buffer> buffers;
  for (const int64_t* at = words; at + 2 <= words + num_words; at += 2 + at[1]) {
    buffers.push_back({sizeof(XLA_FFI_Buffer), nullptr, XLA_FFI_DataType(at[0]), nullptr, at[1],
                       const_cast<int64_t*>(at + 2)});
  }
  return buffers;
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" const char* cadenza_program_operations() { return program_operations(); }

// The bytes of workspace that a program needs; `shapes` are those of all its arrays in their order,
// without the absent one. Null, or an error that is valid until this thread's next call.
extern "C" const char* cadenza_cuda_workspace(const int64_t* shapes, int64_t num_shape_words,
                                              const int64_t* operations, int64_t num_words,
                                              int64_t row_bound, int64_t* needed) {
  thread_local std::string message;
  try {
    const std::vector<XLA_FFI_Buffer> buffers = buffers_of(shapes, num_shape_words);
    context = {};
    context.is_measured = true;
    context.row_bound = row_bound;
    ffi::Error error = run_operations(Values(buffers), {operations, size_t(num_words)});
    *needed = int64_t(context.needed_bytes);
    context = {};
    if (error.success()) return nullptr;
    message = error.message();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

#ifdef CADENZA_EMULATED_GPU
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CadenzaCudaProgram,
    [](ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> arrays,
       ffi::Span<const int64_t> operations, int64_t row_bound, int64_t workspace_bytes) {
      return run_program(nullptr, args, rets, arrays, operations, row_bound, workspace_bytes);
    },
    ffi::Ffi::Bind()
        .RemainingArgs()
        .RemainingRets()
        .Attr<ffi::Span<const int64_t>>("arrays")
        .Attr<ffi::Span<const int64_t>>("operations")
        .Attr<int64_t>("row_bound")
        .Attr<int64_t>("workspace_bytes"));
#else
XLA_FFI_DEFINE_HANDLER_SYMBOL(CadenzaCudaProgram, run_program,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("arrays")
                                  .Attr<ffi::Span<const int64_t>>("operations")
                                  .Attr<int64_t>("row_bound")
                                  .Attr<int64_t>("workspace_bytes"),
                              {ffi::Traits::kCmdBufferCompatible});
#endif
#pragma GCC visibility pop

}  // namespace cadenza::xla_ffi
