#define CADENZA_ISA scalar
#include "kernels/table.h"

namespace cadenza {
const KernelTable& scalar_kernels();
const KernelTable& scalar_kernels() {
  static constexpr KernelTable kTable = scalar::make_table("scalar");
  return kTable;
}
}  // namespace cadenza
