// How an operation is partitioned into work units. No result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/kernel_table.h"

namespace cadenza {

// Jobs below these sizes run on the calling thread: waking the pool costs more than it saves.
constexpr int64_t kMinParallelOps = 1 << 17;
constexpr int64_t kMinParallelElements = 1 << 14;
// Maximum panels in one claim: large enough to stream weights, small enough to balance threads.
constexpr int64_t kMaxPanels = 32;
// Maximum row tiles multiplied by a panel within one unit.
constexpr int64_t kMaxTilesPerUnit = 12;

// What a partition depends on besides the task.
struct PartitionLimits {
  int max_rows;  // of a register tile
  int threads;
};

// From this many row tiles per thread, threads partition the rows instead of the panels: each
// thread reads all weights, and rows written by a core stay in its cache for the next operation.
constexpr int64_t kMinTilesToPartitionRows = 4;

inline Grid partition_product(int64_t rows, int64_t k, int64_t panels,
                              const PartitionLimits& limits) {
  int64_t tiles = ceil_div(rows, limits.max_rows), blocks = ceil_div(tiles, kMaxTilesPerUnit);
  if (tiles >= kMinTilesToPartitionRows * limits.threads) {
    blocks = round_up(blocks, limits.threads);
  }
  return {rows, k, panels, blocks};
}

inline int index_of(DType dtype) { return static_cast<int>(dtype); }
inline int index_of(WeightFormat format) { return static_cast<int>(format); }

}  // namespace cadenza
