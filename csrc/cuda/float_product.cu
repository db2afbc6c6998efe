// Products with weights of floats.
#include "cuda/f32_tiles.h"
#include "cuda/lt_product.h"

namespace cadenza::cuda {

namespace {

template <class Math, int Stages, bool Aligned>
void chains(const ProductTask& task) {
  if (task.is_gated) {
    launch_tiles<Math, Stages, true, Aligned>(tiled<float>(task));
  } else {
    launch_tiles<Math, Stages, false, Aligned>(tiled<float>(task));
  }
}

void f32_product(const ProductTask& task) {
  using Few = ChainMath<1, 2, 8>;
  if (!is_aligned<float>(task)) return chains<Few, 2, false>(task);
  if (task.rows > 8) return chains<ChainMath<4, 2, 8>, 4, true>(task);
  if (task.is_gated) return launch_tiles<Few, 4, true, true>(tiled<float>(task));
  launch_tiles<ChainMath<1, 1, 8>, 8, false, true>(tiled<float>(task));
}

}  // namespace

void float_product(const ProductTask& task, Workspace& workspace) {
  if (task.w.format == WeightFormat::kF32) return f32_product(task);
  bf16_product(task, workspace);
}

}  // namespace cadenza::cuda
