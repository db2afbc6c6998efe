// Rows of a step grouped by the expert that each has chosen, for products that read an expert's weight
// once for some of its rows.
#pragma once

#include "cuda/launch.h"

namespace cadenza::cuda {

// Some of an expert's pairs: `rows` of the grouped ones, from `first` on.
struct RowTile {
  int32_t expert, first, rows;
};

// In the workspace. A pair is a row and one of its slots, pair = row * chosen + slot.
struct GroupedRows {
  const int32_t* pairs;      // those with an expert, by expert; in any order within one
  const RowTile* tiles;      // of at most `height` pairs
  const int32_t* num_tiles;  // on the device
  int64_t most_tiles;        // that there can be
  int height;
};

struct ChosenExperts {
  const int32_t* ids;  // [rows, chosen]; of no expert if outside [0, experts)
  int64_t rows, chosen, experts;
  const int32_t* count;  // of the rows, on the device

  int64_t num_pairs() const { return rows * chosen; }
  // The tiles' height for which few rows of a tile are empty, of powers of two from `least` to `most`.
  int height(int least, int most) const {
    int height = least;
    while (height < most && num_pairs() > experts * height) height *= 2;
    return height;
  }
};

GroupedRows group_rows(const ChosenExperts& chosen, int height, Workspace& workspace);

}  // namespace cadenza::cuda
