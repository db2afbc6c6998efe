// What the operations' bodies include: the views of XLA's buffers and the launch of kernels.
//
// A body checks shapes and types, which the host knows, and launches. What the host does not know,
// such as a step's true number of rows, its kernels read from the device's memory (`count` []);
// rows behind it may be left out, or computed from whatever is there.
#pragma once

#include "cuda/launch.h"
#include "cuda/product.h"
#include "ffi/calls.h"

namespace cadenza::xla_ffi {

// The true number of rows, on the device; null while a program is measured.
inline const int32_t* device_count(const Any& count) {
  require(count.element_type() == ffi::S32, "count must be int32");
  return data<int32_t>(count);
}

// A weight as product.h takes it; valid as long as the buffer is.
inline cuda::Weight weight_of(const Any& w) {
  const auto shape = w.dimensions();
  return {w.untyped_data(), weight_format(w), shape.begin(), int(shape.size())};
}

}  // namespace cadenza::xla_ffi
