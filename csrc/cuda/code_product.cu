// Products of quantised rows with weights of codes: a block for each panel and tile of rows. The
// formats of a weight's panels are on the device, so one kernel has all of them.
#include "cuda/grouped_product.h"

#include "cuda/code_tile.h"
#include "cuda/epilogue.h"

namespace cadenza::cuda {

namespace {

struct CodeProduct {
  CodeRows x;
  int rows, groups, spans;
  const uint8_t* w;
  int64_t w_bytes;  // of a head's or an expert's weight
  int64_t k;
  int columns;  // of the result
  bool is_gated;
  Epilogue epilogue;
  int64_t out_bytes;  // of a head
  const int32_t* count;
  GroupedRows grouped;  // without pairs: all rows have one weight
  int64_t pairs_of_row;
  int64_t bias_stride;  // of an expert
};

// The rows of a block and its weight.
struct BlockTile {
  int first, rows;  // of all rows, or of the grouped pairs
  int64_t weight;
};

__device__ __forceinline__ BlockTile block_tile(const CodeProduct& product, int height) {
  if (product.grouped.pairs != nullptr) {
    if (int(blockIdx.y) >= *product.grouped.num_tiles) return {0, 0, 0};
    const RowTile tile = product.grouped.tiles[blockIdx.y];
    return {tile.first, tile.rows, tile.expert};
  }
  const int first = int(blockIdx.y) * height;
  const int rows = product.count == nullptr ? product.rows : min(product.rows, *product.count);
  return {first, max(0, min(height, rows - first)), int64_t(blockIdx.z)};
}

// Where the tile's rows are among the quantised ones and in the result; empty rows are the first one.
template <int NR>
__device__ __forceinline__ void find_rows(TileMemory<NR>& memory, const CodeProduct& product,
                                          const BlockTile& tile, bool has_order) {
  const int i = int(threadIdx.x);
  if (i < kRowsOfProduct * NR) {
    const int at = tile.first + (i < tile.rows ? i : 0);
    int source = at, target = at;
    if (product.grouped.pairs != nullptr) {
      target = product.grouped.pairs[at];
      source = has_order ? target : target - target % int(product.pairs_of_row);
    } else {
      source += int(tile.weight) * product.rows;
    }
    memory.sources[i] = source;
    memory.targets[i] = target;
  }
  __syncthreads();
}

template <int NR>
__device__ __forceinline__ void multiply(TileMemory<NR>& memory, const CodePanelView& panel, const TileRows& x,
                                         TileSums<NR>& sums) {
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
__device__ __forceinline__ void finish(const TileMemory<NR>& memory, const CodeProduct& product,
                                       const BlockTile& tile, const TileSums<NR>& sums) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  Epilogue epilogue = product.epilogue;
  if (product.grouped.pairs == nullptr) {
    epilogue.out = static_cast<char*>(epilogue.out) + tile.weight * product.out_bytes;
  } else if (epilogue.bias != nullptr) {
    epilogue.bias += tile.weight * product.bias_stride;
  }
#pragma unroll
  for (int p = 0; p < TileSums<NR>::kPairs; p++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 2 * (warp + kCodeWarps * p) + i;
      if (row >= tile.rows) continue;
      const float sum = sums.of[p][i];
      if (product.is_gated) {
        const float up = warp_shuffle_xor(sum, kLanes);
        const int column = int(blockIdx.x) * kLanes + lane;
        if (lane < kLanes && column < product.columns) {
          epilogue.finish_gated(memory.targets[row], column, sum, up);
        }
      } else {
        const int column = int(blockIdx.x) * kPanel + lane;
        if (column < product.columns) epilogue.finish(memory.targets[row], column, sum);
      }
    }
  }
}

template <int NR>
__global__ void __launch_bounds__(kCodeWarps* kWarp, 2) code_kernel(CodeProduct product) {
  TileMemory<NR>& memory = *shared_memory<TileMemory<NR>>();
  const BlockTile tile = block_tile(product, kRowsOfProduct * NR);
  if (tile.rows == 0) return;
  const uint8_t* weight = product.w + tile.weight * product.w_bytes;
  find_rows<NR>(memory, product, tile, device_order(weight) != nullptr);
  const CodePanelView panel = device_panel(weight, int(blockIdx.x), product.k);
  TileSums<NR> sums;
  multiply<NR>(memory, panel, {product.x, product.groups, product.spans, tile.rows}, sums);
  finish<NR>(memory, product, tile, sums);
}

void launch_product(const CodeProduct& product, int height, dim3 grid) {
  constexpr unsigned kThreads = kCodeWarps * kWarp;
  if (height <= 8) {
    launch(code_kernel<1>, grid, kThreads, sizeof(TileMemory<1>), product);
  } else if (height <= 16) {
    launch(code_kernel<2>, grid, kThreads, sizeof(TileMemory<2>), product);
  } else {
    launch(code_kernel<4>, grid, kThreads, sizeof(TileMemory<4>), product);
  }
}

CodeProduct product_of(const ProductTask& task) {
  CodeProduct product{};
  product.rows = int(task.rows);
  product.groups = int(ceil_div(task.k, kGroup));
  product.spans = int(num_remainders(task.k));
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

unsigned num_panels(const ProductTask& task) {
  return unsigned(task.is_gated ? ceil_div(task.out_columns(), kLanes) : ceil_div(task.n, kPanel));
}

}  // namespace

void code_product(const ProductTask& task, Workspace& workspace) {
  CodeProduct product = product_of(task);
  product.x = quantise_rows(task, {}, workspace);
  const int height = task.rows <= 8 ? 8 : task.rows <= 16 ? 16 : 32;
  launch_product(product, height,
                 {num_panels(task), unsigned(ceil_div(task.rows, height)), unsigned(task.heads.num)});
}

void code_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                             Workspace& workspace) {
  CodeProduct product = product_of(task);
  ProductTask of_pairs = task;
  of_pairs.rows = chosen.num_pairs();
  product.x = quantise_rows(of_pairs, {chosen.ids, chosen.experts, chosen.chosen, pairs_of_row}, workspace);
  const int height = chosen.height(kRowsOfProduct, 4 * kRowsOfProduct);
  product.grouped = group_rows(chosen, height, workspace);
  product.pairs_of_row = pairs_of_row;
  product.w_bytes = task.w.shape[task.w.rank - 1];
  product.bias_stride = task.n;
  launch_product(product, height, {num_panels(task), unsigned(product.grouped.most_tiles)});
}

bool codes_fit(const Weight& w, int first, int64_t, int64_t) {
  return w.rank == first + 1 && w.shape[first] > int64_t(sizeof(CodesHeader));
}

}  // namespace cadenza::cuda
