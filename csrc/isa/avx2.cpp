#define CADENZA_ISA avx2
#define CADENZA_VEC_AVX2
#include "kernels/table.h"

namespace cadenza {
const KernelTable& avx2_kernels();
const KernelTable& avx2_kernels() {
  static constexpr KernelTable kTable = avx2::make_table("avx2");
  return kTable;
}
}  // namespace cadenza
