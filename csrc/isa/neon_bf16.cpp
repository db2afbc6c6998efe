#define CADENZA_ISA neon_bf16
#define CADENZA_VEC_NEON
#include "kernels/table.h"

namespace cadenza {
const KernelTable& neon_bf16_kernels();
const KernelTable& neon_bf16_kernels() {
  static constexpr KernelTable kTable = neon_bf16::make_table("neon_bf16");
  return kTable;
}
}  // namespace cadenza
