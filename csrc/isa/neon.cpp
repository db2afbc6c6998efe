#define CADENZA_ISA neon
#define CADENZA_VEC_NEON
#include "kernels/table.h"

namespace cadenza {
extern const KernelTable neon_kernels;
const KernelTable neon_kernels = neon::make_table("neon");
}  // namespace cadenza
