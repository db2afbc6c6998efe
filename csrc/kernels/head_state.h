// The matrix that is the state of a row and a head, in blocks of 16 columns of values.
//
// Columns are independent of one another: tokens pass in order over a block, which stays in the
// first-level cache, before the next. So any cut of a prompt gives the same bits.
#pragma once

#include "core/kernel_table.h"
#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

// Tokens that pass over a block before the next.
constexpr int64_t kStateTokens = 64;

// Four sums of every fourth key, added in a fixed tree.
struct KeySums {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  Vec total() const { return add(add(sums[0], sums[1]), add(sums[2], sums[3])); }
};

class HeadState {
 public:
  // The row has tokens.
  HeadState(const StateRows& rows, const StateMatrices& matrices, int64_t row, int64_t head,
            Arena& arena)
      : rows_(rows), matrices_(matrices), row_(row), head_(head) {
    const int64_t block = matrices.keys * kLanes;
    const int32_t last = rows.kept[rows.end(row) - 1];
    newest_ = last >= 0 ? slot(last) : arena.take<float>(matrices.head_size());
    zeros_ = arena.take<float>(block);
    for (int64_t i = 0; i < block; i += kLanes) store(zeros_ + i, zero());
  }

  // The columns from `column` on, [keys, 16], before the next token, which may be the row's first.
  const float* before(int64_t column, bool is_start) const {
    if (!is_start) return newest(column);
    const int32_t initial = rows_.initial[row_];
    return initial >= 0 ? slot(initial) + column * matrices_.keys : zeros_;
  }

  // Those behind the newest token: where the last one is kept, or scratch.
  float* newest(int64_t column) const { return newest_ + column * matrices_.keys; }

  // Keeps the columns behind a token, if that is asked for.
  void keep(int64_t token, int64_t column) const {
    const int32_t kept = rows_.kept[token];
    if (kept < 0 || slot(kept) == newest_) return;
    const float* from = newest(column);
    float* to = slot(kept) + column * matrices_.keys;
    for (int64_t i = 0; i < matrices_.keys * kLanes; i += kLanes) store(to + i, load(from + i));
  }

 private:
  float* slot(int32_t index) const {
    const int64_t layer = matrices_.heads * matrices_.head_size();
    return matrices_.pool + rows_.place(index, layer) + head_ * matrices_.head_size();
  }

  const StateRows& rows_;
  const StateMatrices& matrices_;
  const int64_t row_, head_;
  float* newest_;  // [values / 16, keys, 16]
  float* zeros_;   // [keys, 16]
};

}  // namespace cadenza::CADENZA_ISA
