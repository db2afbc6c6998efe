// Operations whose kernels are not there yet.
#include "cuda/bodies.h"

namespace cadenza::xla_ffi {

namespace {
ffi::Error missing(const char* name) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(name) + " has no kernel for GPUs");
}
}  // namespace

}  // namespace cadenza::xla_ffi

namespace cadenza::cuda {

void float8_product(const ProductTask&, Workspace&) { throw std::invalid_argument("float8 weights have no kernel for GPUs"); }

bool float8_fits(const Weight&, int, int64_t, int64_t) { return true; }

}  // namespace cadenza::cuda
