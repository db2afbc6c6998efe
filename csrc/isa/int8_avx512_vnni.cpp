#define CADENZA_ISA int8_avx512_vnni
#define CADENZA_VEC_AVX512
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_avx512_vnni_kernels;
const IntegerKernels int8_avx512_vnni_kernels = int8_avx512_vnni::make_integer_kernels("avx512_vnni");
}  // namespace cadenza
