// Products whose rows are grouped by expert, by the tiles of tiles.h: a block has some weight rows of one
// expert for some of its pairs.
#pragma once

#include "cuda/groups.h"
#include "cuda/tiles.h"

namespace cadenza::cuda {

template <class T>
struct GroupedProduct {
  TiledProduct<T> product;  // heads and count are those of one expert and of none
  GroupedRows grouped;
  int32_t pairs_of_row;  // pairs that share a row of x
};

template <class Math, bool Gated>
__device__ __forceinline__ void finish_tile(const GroupedProduct<typename Math::T>& p, const RowTile& tile,
                                            Math& math) {
  Epilogue epilogue = p.product.epilogue;
  if (epilogue.bias != nullptr) epilogue.bias += int64_t(tile.expert) * p.product.n;
  const int32_t* pairs = p.grouped.pairs + tile.first;
  if constexpr (Gated) {
    math.each_pair([&](int r, int token, float gate, float up) {
      const int64_t column = weight_row<Math, true>(r, p.product.n);
      if (column >= 0 && token < tile.rows) epilogue.finish_gated(pairs[token], column, gate, up);
    });
  } else {
    math.each([&](int r, int token, float sum) {
      const int64_t column = weight_row<Math, false>(r, p.product.n);
      if (column >= 0 && token < tile.rows) epilogue.finish(pairs[token], column, sum);
    });
  }
}

// Grid: tiles of pairs, of which consecutive ones may share weights, and blocks of weight rows.
template <class Math, int Stages, bool Gated, bool Aligned>
__global__ void __launch_bounds__(Math::kThreads) grouped_product(GroupedProduct<typename Math::T> p) {
  using T = typename Math::T;
  if (int(blockIdx.x) >= *p.grouped.num_tiles) return;
  const RowTile tile = p.grouped.tiles[blockIdx.x];
  const int32_t* pairs = p.grouped.pairs + tile.first;
  const T* w = p.product.w + int64_t(tile.expert) * p.product.n * p.product.k;
  const RowCopies<T, Math::kRows, Math::kThreads, Aligned> weights([&](int r) {
    const int64_t row = weight_row<Math, Gated>(r, p.product.n);
    return row < 0 ? nullptr : w + row * p.product.k;
  });
  const RowCopies<T, Math::kTokens, Math::kThreads, Aligned> tokens([&](int r) {
    return r < tile.rows ? p.product.x + int64_t(pairs[r] / p.pairs_of_row) * p.product.x_stride : nullptr;
  });
  Math math;
  multiply_stages<Math, Stages>(math, weights, tokens, p.product);
  finish_tile<Math, Gated>(p, tile, math);
}

template <class Math, int Stages, bool Gated, bool Aligned>
void launch_grouped(const GroupedProduct<typename Math::T>& p) {
  static_assert(Stages >= 2);
  const int64_t n = p.product.n;
  const int64_t columns = Gated ? n / 2 : n, width = Gated ? Math::kRows / 2 : Math::kRows;
  const dim3 grid{unsigned(p.grouped.most_tiles), unsigned(ceil_div(columns, width))};
  launch(grouped_product<Math, Stages, Gated, Aligned>, grid, Math::kThreads, shared_bytes_of<Math, Stages>(), p);
}

}  // namespace cadenza::cuda
