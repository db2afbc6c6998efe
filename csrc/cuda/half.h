// Conversion from f16, exact.
#pragma once

#include "cuda/device.h"

#ifndef CADENZA_EMULATED_GPU
#include <cuda_fp16.h>
#else
#include "core/half.h"
#endif

namespace cadenza::cuda {

__device__ __forceinline__ float half_to_float(uint32_t bits) {
#ifdef CADENZA_EMULATED_GPU
  return f16_to_f32(uint16_t(bits));
#else
  return __half2float(__ushort_as_half(uint16_t(bits)));
#endif
}

}  // namespace cadenza::cuda
