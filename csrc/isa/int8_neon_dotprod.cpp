#define CADENZA_ISA int8_neon_dotprod
#define CADENZA_VEC_NEON
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_neon_dotprod_kernels;
const IntegerKernels int8_neon_dotprod_kernels = int8_neon_dotprod::make_integer_kernels("neon_dotprod");
}  // namespace cadenza
