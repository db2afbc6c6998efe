// Products of quantised rows with weights of codes. The formats of a weight's panels are on the device,
// so one kernel has all of them.
#include "cuda/code_tile.h"
#include "cuda/grouped_product.h"

namespace cadenza::cuda {

namespace {

struct CodeProduct {
  PanelProduct panels;
  CodeRows x;
  int groups, spans;
};

// Where the tile's rows are among the quantised ones and in the result.
template <int NR>
__device__ __forceinline__ void find_rows(TileMemory<NR>& memory, const PanelProduct& product,
                                          const PanelTile& tile, bool has_order) {
  const int i = int(threadIdx.x);
  if (i < kRowsOfProduct * NR) {
    const int target = target_row(product, tile, i);
    memory.targets[i] = target;
    if (product.grouped.pairs == nullptr) {
      memory.sources[i] = int(tile.weight) * product.rows + target;
    } else {
      memory.sources[i] = has_order ? target : target - target % product.pairs_of_row;
    }
  }
  __syncthreads();
}

template <int NR>
__device__ __forceinline__ void multiply(TileMemory<NR>& memory, const CodePanelView& panel, const TileRows& x,
                                         PanelSums<NR>& sums) {
  switch (panel.entry().unpacking) {
    case Unpacking::kNibbles:
      return CodeTile<Unpacking::kNibbles, NR>(memory, panel, x).run(sums);
    case Unpacking::kE2m1:
      return CodeTile<Unpacking::kE2m1, NR>(memory, panel, x).run(sums);
    case Unpacking::kFiveBits:
      return CodeTile<Unpacking::kFiveBits, NR>(memory, panel, x).run(sums);
    case Unpacking::kSixBits:
      return CodeTile<Unpacking::kSixBits, NR>(memory, panel, x).run(sums);
    case Unpacking::kBytes:
      return CodeTile<Unpacking::kBytes, NR>(memory, panel, x).run(sums);
    case Unpacking::kHalfBytes:
      return CodeTile<Unpacking::kHalfBytes, NR>(memory, panel, x).run(sums);
  }
}

template <int NR>
__global__ void __launch_bounds__(kPanelWarps* kWarp, 2) code_kernel(CodeProduct product) {
  TileMemory<NR>& memory = *shared_memory<TileMemory<NR>>();
  const PanelTile tile = panel_tile(product.panels, kRowsOfProduct * NR);
  if (tile.rows == 0) return;
  const uint8_t* weight = product.panels.w + tile.weight * product.panels.w_bytes;
  find_rows<NR>(memory, product.panels, tile, device_order(weight) != nullptr);
  const CodePanelView panel = device_panel(weight, int(blockIdx.x), product.panels.k);
  PanelSums<NR> sums;
  multiply<NR>(memory, panel, {product.x, product.groups, product.spans, tile.rows}, sums);
  finish_panel<NR>(product.panels, tile, memory.targets, sums);
}

void launch_product(const CodeProduct& product, int height, dim3 grid) {
  constexpr unsigned kThreads = kPanelWarps * kWarp;
  if (height <= 8) {
    launch(code_kernel<1>, grid, kThreads, sizeof(TileMemory<1>), product);
  } else if (height <= 16) {
    launch(code_kernel<2>, grid, kThreads, sizeof(TileMemory<2>), product);
  } else {
    launch(code_kernel<4>, grid, kThreads, sizeof(TileMemory<4>), product);
  }
}

CodeProduct product_of(const ProductTask& task) {
  return {panel_product(task), {}, int(ceil_div(task.k, kGroup)), int(num_remainders(task.k))};
}

}  // namespace

void code_product(const ProductTask& task, Workspace& workspace) {
  CodeProduct product = product_of(task);
  product.x = quantise_rows(task, {}, workspace);
  const int height = panel_height(task.rows);
  launch_product(product, height, panel_grid(task, ceil_div(task.rows, height)));
}

void code_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                             Workspace& workspace) {
  CodeProduct product = product_of(task);
  ProductTask of_pairs = task;
  of_pairs.rows = chosen.num_pairs();
  product.x = quantise_rows(of_pairs, {chosen.ids, chosen.experts, chosen.chosen, pairs_of_row}, workspace);
  const int height = group_panels(product.panels, task, chosen, pairs_of_row, workspace);
  product.panels.w_bytes = task.w.shape[task.w.rank - 1];
  launch_product(product, height, panel_grid(task, product.panels.grouped.most_tiles));
}

bool codes_fit(const Weight& w, int first, int64_t, int64_t) {
  return w.rank == first + 1 && w.shape[first] > int64_t(sizeof(CodesHeader));
}

}  // namespace cadenza::cuda
