// The kernels of `amx` over the model of tile instructions, for tests: never in a wheel. What is not
// made of tiles is of the machine's first portable table, CADENZA_TILE_BASE.
#define CADENZA_ISA amx_emulated
#define CADENZA_EMULATED_TILES
#if defined(__AVX512F__)
#define CADENZA_VEC_AVX512
#elif defined(__AVX2__)
#define CADENZA_VEC_AVX2
#elif defined(__aarch64__)
#define CADENZA_VEC_NEON
#endif
#include "kernels/tile_product.h"

#define CADENZA_JOIN(isa, suffix) isa##suffix
#define CADENZA_KERNELS(isa) CADENZA_JOIN(isa, _kernels)

namespace cadenza {
const KernelTable& CADENZA_KERNELS(CADENZA_TILE_BASE)();
const KernelTable& amx_emulated_kernels();
const KernelTable& amx_emulated_kernels() {
  static const KernelTable table =
      amx_emulated::make_tile_table("amx_emulated", CADENZA_KERNELS(CADENZA_TILE_BASE)());
  return table;
}
}  // namespace cadenza
