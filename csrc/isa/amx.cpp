#define CADENZA_ISA amx
#define CADENZA_VEC_AVX512
#include "kernels/tile_product.h"

namespace cadenza {
extern const KernelTable avx512_kernels, amx_kernels;
const KernelTable amx_kernels = amx::make_tile_table("amx", avx512_kernels);
}  // namespace cadenza
