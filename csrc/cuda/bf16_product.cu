// bf16 products by tiles of tensor cores, whose sizes follow from rows and columns; no bit does.
//
// Reading weights bounds few rows. So blocks are so small that all of them are on the card at once,
// with some 2 MiB or more of weights on their way, and so large that activations, which each block
// reads for itself, are no more than the weights.
#include "cuda/bf16_product.h"

#include "cuda/bf16_tiles.h"

namespace cadenza::cuda {

namespace {

struct Kernel {
  const char* name;  // weight rows by tokens of a block, and stages
  void (*launch)(const ProductTask& task);
};

struct Kernels {
  const Kernel* first;
  int num;
};

template <class Math, int Stages, bool Gated, bool Aligned = true>
void tiles(const ProductTask& task) {
  launch_tiles<Math, Stages, Gated, Aligned>(tiled<bf16>(task));
}

// Of products with so many rows, those with many columns before those with few: a block of these has
// few weight rows, so that there are enough blocks. A thread of a gated product has sums of both halves.
constexpr Kernel kOf8[] = {{"16x8, 12 stages", tiles<TensorMath<1, 1, 1, 1>, 12, false>},
                           {"32x8, 6 stages", tiles<TensorMath<1, 1, 2, 1>, 6, false>},
                           {"32x8 by 2 warps, 8 stages", tiles<TensorMath<2, 1, 1, 1>, 8, false>},
                           {"64x8, 5 stages", tiles<TensorMath<2, 1, 2, 1>, 5, false>}};
constexpr Kernel kOf16[] = {{"32x16, 8 stages", tiles<TensorMath<2, 1, 1, 2>, 8, false>},
                            {"64x16, 5 stages", tiles<TensorMath<2, 1, 2, 2>, 5, false>},
                            {"16x16, 8 stages", tiles<TensorMath<1, 1, 1, 2>, 8, false>},
                            {"64x16 by 4 warps, 6 stages", tiles<TensorMath<4, 1, 1, 2>, 6, false>}};
constexpr Kernel kOf32[] = {{"32x32, 6 stages", tiles<TensorMath<2, 1, 1, 4>, 6, false>},
                            {"64x32, 4 stages", tiles<TensorMath<2, 1, 2, 4>, 4, false>},
                            {"32x32 by 4 warps, 8 stages", tiles<TensorMath<2, 2, 1, 2>, 8, false>},
                            {"64x32 by 4 warps, 6 stages", tiles<TensorMath<4, 1, 1, 4>, 6, false>}};
constexpr Kernel kOf64[] = {{"64x64, 6 stages", tiles<TensorMath<2, 2, 2, 4>, 6, false>},
                            {"128x64, 4 stages", tiles<TensorMath<4, 1, 2, 8>, 4, false>},
                            {"32x64, 6 stages", tiles<TensorMath<2, 2, 1, 4>, 6, false>},
                            {"128x64 by 8 warps, 4 stages", tiles<TensorMath<4, 2, 2, 4>, 4, false>}};
constexpr Kernel kOfMore[] = {{"128x128, 3 stages", tiles<TensorMath<4, 2, 2, 8>, 3, false>},
                              {"128x64, 4 stages", tiles<TensorMath<4, 1, 2, 8>, 4, false>},
                              {"64x64, 6 stages", tiles<TensorMath<2, 2, 2, 4>, 6, false>}};
constexpr Kernel kUnaligned[] = {{"unaligned", tiles<TensorMath<1, 1, 2, 1>, 2, false, false>}};

constexpr Kernel kGatedOf8[] = {{"32x8, 6 stages", tiles<TensorMath<1, 1, 2, 1>, 6, true>},
                                {"64x8, 5 stages", tiles<TensorMath<2, 1, 2, 1>, 5, true>}};
constexpr Kernel kGatedOf16[] = {{"64x16, 5 stages", tiles<TensorMath<2, 1, 2, 2>, 5, true>},
                                 {"32x16, 6 stages", tiles<TensorMath<1, 1, 2, 2>, 6, true>}};
constexpr Kernel kGatedOf32[] = {{"64x32, 4 stages", tiles<TensorMath<2, 1, 2, 4>, 4, true>},
                                 {"128x32, 4 stages", tiles<TensorMath<4, 1, 2, 4>, 4, true>}};
constexpr Kernel kGatedOf64[] = {{"128x64, 4 stages", tiles<TensorMath<4, 1, 2, 8>, 4, true>},
                                 {"64x64, 6 stages", tiles<TensorMath<2, 2, 2, 4>, 6, true>}};
constexpr Kernel kGatedOfMore[] = {{"128x128, 3 stages", tiles<TensorMath<4, 2, 2, 8>, 3, true>},
                                   {"128x64, 4 stages", tiles<TensorMath<4, 1, 2, 8>, 4, true>}};
constexpr Kernel kGatedUnaligned[] = {{"unaligned", tiles<TensorMath<1, 1, 2, 1>, 2, true, false>}};

template <size_t N>
constexpr Kernels all(const Kernel (&kernels)[N]) {
  return {kernels, int(N)};
}

Kernels kernels_of(const ProductTask& task) {
  const bool is_gated = task.is_gated;
  if (!is_aligned<bf16>(task)) return is_gated ? all(kGatedUnaligned) : all(kUnaligned);
  if (task.rows <= 8) return is_gated ? all(kGatedOf8) : all(kOf8);
  if (task.rows <= 16) return is_gated ? all(kGatedOf16) : all(kOf16);
  if (task.rows <= 32) return is_gated ? all(kGatedOf32) : all(kOf32);
  if (task.rows <= 64) return is_gated ? all(kGatedOf64) : all(kOf64);
  return is_gated ? all(kGatedOfMore) : all(kOfMore);
}

// Columns from which there are enough blocks of more weight rows, which are second in the lists.
constexpr int64_t kLeastWide = 8193;
constexpr int64_t kMostFewRows = 64;

// The kernel that is the `kernel`-th of a task: where many columns prefer the second, the first two
// change places.
const Kernel& kernel_of(const ProductTask& task, int kernel) {
  const Kernels kernels = kernels_of(task);
  const bool is_wide = !task.is_gated && kernels.num > 1 && task.rows <= kMostFewRows &&
                       task.n * task.heads.num >= kLeastWide;
  return kernels.first[is_wide && kernel < 2 ? 1 - kernel : kernel];
}

}  // namespace

int num_own_kernels(const ProductTask& task) { return kernels_of(task).num; }

const char* name_of_own_kernel(const ProductTask& task, int kernel) { return kernel_of(task, kernel).name; }

void own_bf16_product(const ProductTask& task, int kernel) { kernel_of(task, kernel).launch(task); }

}  // namespace cadenza::cuda
