// Products whose weights are packed in panels of 32 columns (codes, float8): a block of eight warps has
// one panel and some rows. Its sums are with a thread of their column: lane l has column l, or for gated
// products columns l of the gate below 16 and of the other from there on, and some pairs of rows.
#pragma once

#include "cuda/epilogue.h"
#include "cuda/groups.h"

namespace cadenza::cuda {

constexpr int kPanelWarps = 8;
constexpr int kRowsOfProduct = 8;  // rows of a tile of the tensor cores

struct PanelProduct {
  int rows;
  const uint8_t* w;
  int64_t w_bytes;  // of a head's or an expert's weight
  int64_t k;
  int columns;  // of the result
  bool is_gated;
  Epilogue epilogue;
  int64_t out_bytes;  // of a head
  const int32_t* count;
  GroupedRows grouped;   // without pairs: all rows have one weight
  int pairs_of_row;      // pairs that share a row of x
  int64_t bias_stride;   // of an expert
};

// The rows of a block and its weight.
struct PanelTile {
  int first, rows;  // of all rows, or of the grouped pairs
  int64_t weight;
};

__device__ __forceinline__ PanelTile panel_tile(const PanelProduct& product, int height) {
  if (product.grouped.pairs != nullptr) {
    if (int(blockIdx.y) >= *product.grouped.num_tiles) return {0, 0, 0};
    const RowTile tile = product.grouped.tiles[blockIdx.y];
    return {tile.first, tile.rows, tile.expert};
  }
  const int first = int(blockIdx.y) * height;
  const int rows = product.count == nullptr ? product.rows : min(product.rows, *product.count);
  return {first, max(0, min(height, rows - first)), int64_t(blockIdx.z)};
}

// The row of the result of row `at` of a tile's; rows that are not there are the first one.
__device__ __forceinline__ int target_row(const PanelProduct& product, const PanelTile& tile, int at) {
  const int row = tile.first + (at < tile.rows ? at : 0);
  return product.grouped.pairs != nullptr ? product.grouped.pairs[row] : row;
}

// The sums of a thread: of both rows of the pairs warp and warp + 8 of a tile of 8 NR rows.
template <int NR>
struct PanelSums {
  static constexpr int kPairs = NR == 4 ? 2 : 1;
  float of[kPairs][2];
};

template <int NR>
__device__ __forceinline__ void finish_panel(const PanelProduct& product, const PanelTile& tile,
                                             const int32_t* targets, const PanelSums<NR>& sums) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  Epilogue epilogue = product.epilogue;
  if (product.grouped.pairs == nullptr) {
    epilogue.out = static_cast<char*>(epilogue.out) + tile.weight * product.out_bytes;
  } else if (epilogue.bias != nullptr) {
    epilogue.bias += tile.weight * product.bias_stride;
  }
#pragma unroll
  for (int p = 0; p < PanelSums<NR>::kPairs; p++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 2 * (warp + kPanelWarps * p) + i;
      if (row >= tile.rows) continue;
      const float sum = sums.of[p][i];
      if (product.is_gated) {
        const float up = warp_shuffle_xor(sum, kLanes);
        const int column = int(blockIdx.x) * kLanes + lane;
        if (lane < kLanes && column < product.columns) epilogue.finish_gated(targets[row], column, sum, up);
      } else {
        const int column = int(blockIdx.x) * kPanel + lane;
        if (column < product.columns) epilogue.finish(targets[row], column, sum);
      }
    }
  }
}

inline PanelProduct panel_product(const ProductTask& task) {
  PanelProduct product{};
  product.rows = int(task.rows);
  product.w = static_cast<const uint8_t*>(task.w.data);
  product.w_bytes = task.heads.w_bytes;
  product.k = task.k;
  product.columns = int(task.out_columns());
  product.is_gated = task.is_gated;
  product.epilogue = epilogue_of(task);
  product.out_bytes = task.heads.out_bytes;
  product.count = task.count;
  product.pairs_of_row = 1;
  return product;
}

// Gives a product the rows of experts, in tiles of the height that is returned.
inline int group_panels(PanelProduct& product, const ProductTask& task, const ChosenExperts& chosen,
                        int64_t pairs_of_row, Workspace& workspace) {
  const int height = chosen.height(kRowsOfProduct, 4 * kRowsOfProduct);
  product.grouped = group_rows(chosen, height, workspace);
  product.pairs_of_row = int(pairs_of_row);
  product.bias_stride = task.n;
  return height;
}

// Blocks: panels, tiles of rows and heads.
inline dim3 panel_grid(const ProductTask& task, int64_t tiles) {
  const int64_t panels = task.is_gated ? ceil_div(task.out_columns(), kLanes) : ceil_div(task.n, kPanel);
  return {unsigned(panels), unsigned(tiles), unsigned(task.heads.num)};
}

// The height of a tile of so many rows.
inline int panel_height(int64_t rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }

}  // namespace cadenza::cuda
