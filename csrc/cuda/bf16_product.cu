// bf16 products by tiles of tensor cores, whose sizes follow from rows and columns; no bit does.
//
// Reading weights bounds few rows. So blocks are so small that all of them are on the card at once,
// with some 2 MiB or more of weights on their way, and so large that activations, which each block
// reads for itself, are no more than the weights.
#include "cuda/bf16_product.h"

#include "cuda/bf16_tiles.h"

namespace cadenza::cuda {

namespace {

// Columns up to which a block has few weight rows, so that there are enough blocks.
constexpr int64_t kMostThin = 8192;
// Rows from which products are bound by multiplying.
constexpr int64_t kMostFewRows = 64;

template <class Math, int Stages, bool Aligned = true>
void tiles(const ProductTask& task) {
  if (task.is_gated) {
    launch_tiles<Math, Stages, true, Aligned>(tiled<bf16>(task));
  } else {
    launch_tiles<Math, Stages, false, Aligned>(tiled<bf16>(task));
  }
}

void thin_product(const ProductTask& task) {
  const TiledProduct<bf16> p = tiled<bf16>(task);
  if (task.rows <= 8) return launch_tiles<TensorMath<1, 1, 1, 1>, 12, false, true>(p);
  if (task.rows <= 16) return launch_tiles<TensorMath<2, 1, 1, 2>, 8, false, true>(p);
  if (task.rows <= 32) return launch_tiles<TensorMath<2, 1, 1, 4>, 6, false, true>(p);
  launch_tiles<TensorMath<2, 2, 2, 4>, 6, false, true>(p);
}

}  // namespace

void own_bf16_product(const ProductTask& task) {
  if (!is_aligned<bf16>(task)) return tiles<TensorMath<1, 1, 2, 1>, 2, false>(task);
  if (task.rows > kMostFewRows) return tiles<TensorMath<4, 2, 2, 8>, 3>(task);
  if (!task.is_gated && task.n * task.heads.num <= kMostThin) return thin_product(task);
  if (task.rows <= 8) return tiles<TensorMath<1, 1, 2, 1>, 6>(task);
  if (task.rows <= 16) return tiles<TensorMath<2, 1, 2, 2>, 5>(task);
  if (task.rows <= 32) return tiles<TensorMath<2, 1, 2, 4>, 4>(task);
  tiles<TensorMath<4, 1, 2, 8>, 4>(task);
}

}  // namespace cadenza::cuda
