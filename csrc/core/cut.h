// How work is cut into units; no result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/types.h"

namespace cadenza {

// Below this a fork and join costs more than it saves.
constexpr int64_t kWorthSharingOps = 1 << 17;
constexpr int64_t kWorthSharingElements = 1 << 14;
// Panels claimed at once at most: long enough to stream, short enough to balance.
constexpr int64_t kMaxPanels = 32;
// Row tiles that share a panel within one unit.
constexpr int64_t kTilesPerUnit = 12;

inline int64_t count_row_blocks(int64_t rows, int max_rows) {
  return std::max<int64_t>(1, ceil_div(ceil_div(rows, max_rows), kTilesPerUnit));
}

inline int index_of(DType dtype) { return static_cast<int>(dtype); }

}  // namespace cadenza
