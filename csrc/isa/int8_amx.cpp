#define CADENZA_ISA int8_amx
#define CADENZA_VEC_AVX512
#include "kernels/tile_choice.h"

namespace cadenza {
extern const IntegerKernels int8_amx_kernels;
const IntegerKernels int8_amx_kernels = int8_amx::make_tile_integer_kernels("amx");
}  // namespace cadenza
