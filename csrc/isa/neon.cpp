#define CADENZA_ISA neon
#define CADENZA_VEC_NEON
#include "kernels/table.h"

namespace cadenza {
const KernelTable& neon_kernels();
const KernelTable& neon_kernels() {
  static constexpr KernelTable kTable = neon::make_table("neon");
  return kTable;
}
}  // namespace cadenza
