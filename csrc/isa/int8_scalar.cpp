#define CADENZA_ISA int8_scalar
#include "kernels/quantised.h"

namespace cadenza {
extern const IntegerKernels int8_scalar_kernels;
const IntegerKernels int8_scalar_kernels = int8_scalar::make_integer_kernels("scalar");
}  // namespace cadenza
