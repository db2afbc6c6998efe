#define CADENZA_ISA int8_avx_vnni
#define CADENZA_VEC_AVX2
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_avx_vnni_kernels;
const IntegerKernels int8_avx_vnni_kernels = int8_avx_vnni::make_integer_kernels("avx_vnni");
}  // namespace cadenza
