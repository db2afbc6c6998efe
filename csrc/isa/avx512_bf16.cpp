#define CADENZA_ISA avx512_bf16
#define CADENZA_VEC_AVX512
#include "kernels/table.h"

namespace cadenza {
extern const KernelTable avx512_bf16_kernels;
const KernelTable avx512_bf16_kernels = avx512_bf16::make_table("avx512_bf16");
}  // namespace cadenza
