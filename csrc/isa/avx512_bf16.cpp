#define CADENZA_ISA avx512_bf16
#define CADENZA_VEC_AVX512
#include "kernels/table.h"

namespace cadenza {
const KernelTable& avx512_bf16_kernels();
const KernelTable& avx512_bf16_kernels() {
  static constexpr KernelTable kTable = avx512_bf16::make_table("avx512_bf16");
  return kTable;
}
}  // namespace cadenza
