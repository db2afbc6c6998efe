// Operations whose kernels are not there yet.
#include "cuda/bodies.h"

namespace cadenza::xla_ffi {

namespace {
ffi::Error missing(const char* name) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(name) + " has no kernel for GPUs");
}
}  // namespace

ffi::Error gated_delta_call(Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, AnyResult, AnyResult, AnyResult, int64_t, int64_t, bool, float) { return missing("gated_delta"); }

ffi::Error short_conv_call(Any, Any, Any, Any, Any, Any, Any, AnyResult, AnyResult, int64_t) { return missing("short_conv"); }

ffi::Error selective_scan_call(Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, AnyResult, AnyResult, AnyResult, int64_t, int64_t, float) { return missing("selective_scan"); }

}  // namespace cadenza::xla_ffi

namespace cadenza::cuda {

void float8_product(const ProductTask&, Workspace&) { throw std::invalid_argument("float8 weights have no kernel for GPUs"); }

bool float8_fits(const Weight&, int, int64_t, int64_t) { return true; }

}  // namespace cadenza::cuda
