#define CADENZA_ISA int8_neon
#define CADENZA_VEC_NEON
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_neon_kernels;
const IntegerKernels int8_neon_kernels = int8_neon::make_integer_kernels("neon");
}  // namespace cadenza
