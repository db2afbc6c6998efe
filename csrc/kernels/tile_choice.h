// Which products with quantised weights use tile registers: those of so many rows that tiles are
// faster than dots of vectors on this machine. The bits are the same, so it is measured, once in a
// process: a few runs of small panels of each format, some milliseconds in all. CADENZA_TILE_ROWS
// sets the rows instead.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/quantised_tiles.h"

namespace cadenza::CADENZA_ISA {

// The numbers of rows that are measured, largest first; with more, tiles gain as much as with 32.
constexpr int kMeasuredRows[] = {32, 16, 8, 4};
constexpr int kTrials = 4;
constexpr int64_t kMeasuredK = 512, kMeasuredPanels = 2;

// A product of zeros, which takes as long as any other.
class SamplePanels {
 public:
  explicit SamplePanels(int format)
      : weight_(zeros(int64_t(sizeof(CodesHeader)) +
                      kMeasuredPanels * code_panel_bytes(format, kMeasuredK))),
        rows_(zeros(kMeasuredRows[0] * code_row_bytes(kMeasuredK))) {
    *reinterpret_cast<CodesHeader*>(weight_) = {
        CodesHeader::kVersion, 1, 0, kMeasuredK, {{format, int32_t(kMeasuredPanels)}}};
  }

  // Seconds of the fastest trial where formats are multiplied by tiles from `least` rows on.
  double seconds(int rows, const LeastTileRows& least) {
    using Clock = std::chrono::steady_clock;
    double best = 1e9;
    for (int trial = 0; trial < kTrials; trial++) {
      unit_arena_.reset();
      Worker worker{0, unit_arena_};
      float sum = 0;
      const auto start = Clock::now();
      run_tiled_panels(rows_, weight_, {rows, kMeasuredK, kMeasuredPanels, 1}, 0, kMeasuredPanels,
                       worker, least, [&](int64_t) {
                         return [&](int64_t, const Vec(&columns)[kPanelVecs]) {
                           sum += reduce_max(columns[0]);
                         };
                       });
      observe(sum);
      const double taken = std::chrono::duration<double>(Clock::now() - start).count();
      if (taken < best) best = taken;
    }
    return best;
  }

 private:
  uint8_t* zeros(int64_t bytes) {
    auto* memory = arena_.take<uint8_t>(bytes);
    std::memset(memory, 0, size_t(bytes));
    return memory;
  }

  Arena arena_, unit_arena_;
  uint8_t *weight_, *rows_;
};

inline LeastTileRows all_from(int rows) {
  LeastTileRows least;
  for (int& each : least.of_formats) each = rows;
  return least;
}

// The fewest measured rows from which tiles are always faster.
inline int measured_least(int format) {
  SamplePanels panels(format);
  int least = kNeverByTiles;
  for (int rows : kMeasuredRows) {
    if (panels.seconds(rows, all_from(1)) >= panels.seconds(rows, all_from(kNeverByTiles))) break;
    least = rows;
  }
  return least;
}
inline LeastTileRows measured_least_rows() {
  LeastTileRows least;
  for (int format = 0; format < kNumCodeFormats; format++) {
    least.of_formats[format] = measured_least(format);
  }
  release_tiles();
  return least;
}

// What CADENZA_TILE_ROWS sets.
inline LeastTileRows stated_least_rows(const std::string& text) {
  const bool is_number = text.find_first_not_of("0123456789") == std::string::npos;
  const int rows = is_number && text.size() <= 6 ? std::atoi(text.c_str()) : 0;
  if (text == "never") return all_from(kNeverByTiles);
  if (rows == 0) {
    throw std::invalid_argument("CADENZA_TILE_ROWS is '" + text +
                                "'; it is a number of rows from 1 on, or never");
  }
  return all_from(rows);
}

inline LeastTileRows choose_least_rows() {
  const char* stated = std::getenv("CADENZA_TILE_ROWS");
  if (stated != nullptr && *stated != 0) return stated_least_rows(stated);
#ifdef CADENZA_EMULATED_TILES
  return all_from(1);  // the model of tiles would never be faster
#else
  return measured_least_rows();
#endif
}

inline const LeastTileRows& least_tile_rows() {
  static const LeastTileRows chosen = choose_least_rows();
  return chosen;
}

// CodeProduct, with tiles where they are faster.
struct TiledCodeProduct : CodeProduct {
  template <class MakeEpilogue>
  static void run(const void* x, const void* w, const Grid& grid, int64_t begin, int64_t end,
                  Worker& worker, const MakeEpilogue& make_epilogue) {
    run_tiled_panels(x, w, grid, begin, end, worker, least_tile_rows(), make_epilogue);
  }
};

// Products of whole tiles without their loads: the upper bound of all products.
inline void multiply_code_tiles_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const MultiplyTask*>(context);
  TileConfig config;
  for (int tile = 0; tile < kTiles; tile++) config.set(tile, kTileRows, kTileRowBytes);
  tile_configure(config);  // zeroes them
  const int64_t steps = (end - begin) * task.steps;
  for (int64_t step = 0; step < steps; step++) {
    tile_dot_codes<0, 4, 6>();
    tile_dot_codes<1, 4, 7>();
    tile_dot_codes<2, 5, 6>();
    tile_dot_codes<3, 5, 7>();
  }
  constexpr int64_t kPerStep = 4 * 2 * kTileRows * kTileRowBytes * kLanes;
  __atomic_fetch_add(task.operations, steps * kPerStep, __ATOMIC_RELAXED);
}

inline const int* least_rows_of_formats() { return least_tile_rows().of_formats; }

// A unit has up to kMaxTilesPerUnit tiles of rows.
constexpr IntegerKernels make_tile_integer_kernels(const char* isa) {
  return make_integer_kernels<TiledCodeProduct>(
      isa, {kTileRows, multiply_code_tiles_units, least_rows_of_formats});
}

}  // namespace cadenza::CADENZA_ISA
