#define CADENZA_ISA scalar
#include "kernels/table.h"

namespace cadenza {
extern const KernelTable scalar_kernels;
const KernelTable scalar_kernels = scalar::make_table("scalar");
}  // namespace cadenza
