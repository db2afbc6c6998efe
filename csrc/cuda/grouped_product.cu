// Products of experts whose weights are floats. Tiles are as low as few pairs an expert allow, so that
// few rows of them are empty; no bit depends on it.
#include "cuda/grouped_product.h"

#include "cuda/bf16_tiles.h"
#include "cuda/f32_tiles.h"
#include "cuda/grouped_tiles.h"

namespace cadenza::cuda {

namespace {

struct Given {
  const ProductTask& task;
  const ChosenExperts& chosen;
  int64_t pairs_of_row;
  Workspace& workspace;
};

template <class Math, int Stages, bool Aligned = true>
void tiles(const Given& given) {
  using T = typename Math::T;
  GroupedProduct<T> p{tiled<T>(given.task), group_rows(given.chosen, Math::kTokens, given.workspace),
                      int32_t(given.pairs_of_row)};
  p.product.count = nullptr;
  if (given.task.is_gated) {
    launch_grouped<Math, Stages, true, Aligned>(p);
  } else {
    launch_grouped<Math, Stages, false, Aligned>(p);
  }
}

void bf16_tiles(const Given& given) {
  if (!is_aligned<bf16>(given.task)) return tiles<TensorMath<1, 1, 2, 1>, 2, false>(given);
  switch (given.chosen.height(8, 64)) {
    case 8:
      return tiles<TensorMath<1, 1, 2, 1>, 6>(given);
    case 16:
      return tiles<TensorMath<2, 1, 2, 2>, 5>(given);
    case 32:
      return tiles<TensorMath<2, 1, 2, 4>, 4>(given);
    default:
      return tiles<TensorMath<4, 1, 2, 8>, 4>(given);
  }
}

void f32_tiles(const Given& given) {
  using Few = ChainMath<1, 2, 8>;
  if (!is_aligned<float>(given.task)) return tiles<Few, 2, false>(given);
  if (given.chosen.height(8, 32) == 8) return tiles<Few, 4>(given);
  tiles<ChainMath<4, 2, 8>, 4>(given);
}

}  // namespace

void float_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                              Workspace& workspace) {
  const Given given{task, chosen, pairs_of_row, workspace};
  if (task.w.format == WeightFormat::kF32) return f32_tiles(given);
  bf16_tiles(given);
}

void product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                        Workspace& workspace) {
  switch (task.w.format) {
    case WeightFormat::kBf16:
    case WeightFormat::kF32:
      return float_product_of_experts(task, chosen, pairs_of_row, workspace);
    case WeightFormat::kCodes:
      return code_product_of_experts(task, chosen, pairs_of_row, workspace);
    case WeightFormat::kFloat8:
      return float8_product_of_experts(task, chosen, pairs_of_row, workspace);
  }
}

}  // namespace cadenza::cuda
