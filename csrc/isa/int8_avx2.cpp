#define CADENZA_ISA int8_avx2
#define CADENZA_VEC_AVX2
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_avx2_kernels;
const IntegerKernels int8_avx2_kernels = int8_avx2::make_integer_kernels("avx2");
}  // namespace cadenza
