#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "core/float8.h"

namespace cadenza {

namespace {

constexpr int64_t kPanelsPerClaim = 4;
constexpr uint8_t kNaNCode = 0x7f;  // and its negative

// One column of a panel, which is a row of a source; `codes` is null in the padding.
struct Float8Column {
  const uint8_t* codes;
  const float* scales;
};

Float8Column row_of(const Float8Source& source, int64_t row, int64_t k) {
  return {source.codes + row * source.row_stride, source.scales + row * ceil_div(k, kFloat8Block)};
}

Float8Column column_of(const Float8PackTask& task, int64_t panel, int64_t lane) {
  if (task.gated) {
    const Float8Source& source = task.sources[size_t(lane / kLanes)];
    int64_t row = panel * kLanes + lane % kLanes;
    return row < source.rows ? row_of(source, row, task.k) : Float8Column{nullptr, nullptr};
  }
  int64_t row = panel * kPanel + lane;
  for (const Float8Source& source : task.sources) {
    if (row < source.rows) return row_of(source, row, task.k);
    row -= source.rows;
  }
  return {nullptr, nullptr};
}

bool has_nan(const uint8_t* codes, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; i++) found |= (codes[i] & kNaNCode) == kNaNCode;
  return found;
}

// Writes one block of a column: its scale at scales[lane], its codes two bytes of each step.
void store_block(Float8Column column, int64_t block, int64_t k, int64_t lane, uint8_t* to) {
  float scale = 0.0f;
  uint8_t codes[kFloat8Block] = {};
  const int64_t begin = block * kFloat8Block, count = std::min<int64_t>(kFloat8Block, k - begin);
  if (column.codes != nullptr) {
    std::memcpy(codes, column.codes + begin, size_t(count));
    scale = column.scales[block];
    if (has_nan(codes, count)) scale = std::numeric_limits<float>::quiet_NaN();
  }
  std::memcpy(to + lane * int64_t(sizeof(scale)), &scale, sizeof(scale));
  uint8_t* steps = to + kFloat8ScaleBytes + lane * 2;
  for (int64_t i = 0; i < count; i += 2) std::memcpy(steps + i / 2 * kFloat8StepBytes, codes + i, 2);
}

// A unit is one panel.
void pack_float8_panels(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const Float8PackTask*>(context);
  constexpr int64_t kBlockBytes = panel_bytes(WeightFormat::kFloat8, kFloat8Block);
  for (int64_t panel = begin; panel < end; panel++) {
    uint8_t* to = task.packed + panel * panel_bytes(WeightFormat::kFloat8, task.k);
    for (int64_t block = 0; block < ceil_div(task.k, kFloat8Block); block++, to += kBlockBytes) {
      for (int64_t lane = 0; lane < kPanel; lane++) {
        store_block(column_of(task, panel, lane), block, task.k, lane, to);
      }
    }
  }
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

void pack_float8(Executor& executor, const Float8PackTask& task) {
  check(!task.sources.empty() && task.k > 0, "pack: sizes must be positive");
  check(reinterpret_cast<uintptr_t>(task.packed) % 64 == 0, "pack: buffer is not 64-byte aligned");
  int64_t columns = 0;
  for (const Float8Source& source : task.sources) {
    check(source.rows >= 0 && source.row_stride >= task.k, "pack: a source has too few elements");
    columns += source.rows;
  }
  if (task.gated) {
    check(task.sources.size() == 2 && task.sources[0].rows == task.sources[1].rows,
          "pack: gate and up must be two sources of equal sizes");
  }
  int64_t panels = task.gated ? ceil_div(columns / 2, kLanes) : ceil_div(columns, kPanel);
  Executor::Lease lease(executor);
  lease.run({pack_float8_panels, &task, panels, kPanelsPerClaim}, columns * task.k > (1 << 16));
}

}  // namespace cadenza
