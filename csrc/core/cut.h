// How work is cut into units; no result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/kernel_table.h"

namespace cadenza {

// Below this a fork and join costs more than it saves.
constexpr int64_t kWorthSharingOps = 1 << 17;
constexpr int64_t kWorthSharingElements = 1 << 14;
// Panels claimed at once at most: long enough to stream, short enough to balance.
constexpr int64_t kMaxPanels = 32;
// Row tiles that share a panel within one unit.
constexpr int64_t kTilesPerUnit = 12;

// What a cut depends on besides the task.
struct CutFor {
  int max_rows;  // of a register tile
  int threads;
};

// Row tiles of a thread from which on threads share the rows of a product, and not its panels: the
// weights are read by each, and the rows that a core has written stay with it.
constexpr int64_t kTilesToShareRows = 4;

inline Grid cut_product(int64_t rows, int64_t k, int64_t panels, const CutFor& by) {
  int64_t tiles = ceil_div(rows, by.max_rows), blocks = ceil_div(tiles, kTilesPerUnit);
  if (tiles >= kTilesToShareRows * by.threads) blocks = round_up(blocks, by.threads);
  return {rows, k, panels, blocks};
}

inline int index_of(DType dtype) { return static_cast<int>(dtype); }

}  // namespace cadenza
