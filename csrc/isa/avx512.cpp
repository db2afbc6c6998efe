#define CADENZA_ISA avx512
#define CADENZA_VEC_AVX512
#include "kernels/table.h"

namespace cadenza {
const KernelTable& avx512_kernels();
const KernelTable& avx512_kernels() {
  static constexpr KernelTable kTable = avx512::make_table("avx512");
  return kTable;
}
}  // namespace cadenza
