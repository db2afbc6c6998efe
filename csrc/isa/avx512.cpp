#define CADENZA_ISA avx512
#define CADENZA_VEC_AVX512
#include "kernels/table.h"

namespace cadenza {
extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = avx512::make_table("avx512");
}  // namespace cadenza
