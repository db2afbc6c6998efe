// What products with weights of codes prefetch while they multiply.
#pragma once

#include "core/code_format.h"
#include "core/kernel_table.h"
#include "kernels/linear.h"

namespace cadenza::CADENZA_ISA {

// Where a thread reads on `distance` bytes behind the start of a panel: behind the `left` panels that
// it reads in a row lies what it reads next.
inline const char* read_ahead(const CodePanel& panel, int64_t left, int64_t distance,
                              const Worker& worker) {
  const char* own = reinterpret_cast<const char*>(panel.data);
  const int64_t beyond = distance - left * panel.bytes;
  return beyond >= 0 && worker.prefetch.at != nullptr ? worker.prefetch.at + beyond : own + distance;
}

// A unit's place among those that its thread computes: the panels from it on to the last of the
// thread's share, or of a job that counts other units, to the last of the weight.
struct UnitPlace {
  int64_t left;
  bool is_last_of_share;
  bool has_next;  // within the weight

  UnitPlace(int64_t unit, const Grid& grid, const Worker& worker)
      : left(grid.panels - unit % grid.panels),
        is_last_of_share(unit + 1 == worker.share_end),
        has_next(left > 1) {
    if (unit < worker.share_end) left = worker.share_end - unit;
  }
};

// What a unit prefetches in `count` passes: as run_panels of kernels/linear.h, group by group, and a
// single pass always into both levels.
inline SpreadPrefetch prefetch_of_unit(const CodePanel& panel, int64_t count, const UnitPlace& place,
                                       Worker& worker) {
  const char* own = reinterpret_cast<const char*>(panel.data);
  const int64_t group_bytes = kCodeFormats[panel.format].group_bytes();
  // At 60 GB/s a 4B model in 8 bits took 1.0, 0.88 and 0.75 of the time at 1, 4 and 6 rows, one in
  // Q4_K 0.83 and 0.93 at 1 and 4; at 35 GB/s as long as with the first level alone.
  if (count == 1) {
    return {read_ahead(panel, place.left, kFarPrefetchDistance, worker), group_bytes,
            CacheLevels::kBoth};
  }
  const int64_t share = round_up(ceil_div(group_bytes, count), kCacheLine);
  if (place.is_last_of_share) {
    SpreadPrefetch prefetch;
    if (!worker.prefetch.empty()) prefetch = {worker.prefetch.at, share, levels_of_next_panel(count)};
    worker.prefetch.at += panel.bytes;
    return prefetch;
  }
  if (place.has_next) return {own + panel.bytes, share, levels_of_next_panel(count)};
  // The weight behind this one, which only jobs over several weights know.
  if (worker.share_end > 0 || worker.prefetch.at == nullptr) return {};
  return {worker.prefetch.at, share, levels_of_next_panel(count)};
}

}  // namespace cadenza::CADENZA_ISA
