#define CADENZA_ISA amx
#define CADENZA_VEC_AVX512
#include "kernels/tile_product.h"

namespace cadenza {
const KernelTable& avx512_kernels();
const KernelTable& amx_kernels();
const KernelTable& amx_kernels() {
  // Copied on first use: a CPU without these instructions must not run this when the library loads.
  static const KernelTable table = amx::make_tile_table("amx", avx512_kernels());
  return table;
}
}  // namespace cadenza
