// The rows of a step whose layer has a state, and where their slots are.
//
// Rows are at fixed places of a batch, so few of many may have tokens: blocks are for tokens, or for
// as many rows as there can be with tokens, and find theirs here.
#pragma once

#include "cuda/device.h"

namespace cadenza::cuda {

// Row r's tokens are [query_starts[r], query_starts[r + 1]). Its state before them is that of slot
// initial[r], or zeros if that is negative; the state behind token t goes to slot kept[t], unless that
// is negative. A slot that a step writes is read by no other row of it.
struct SlotRows {
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* initial;       // [rows]
  const int32_t* kept;          // [tokens]
  int rows, tokens, num_slots, num_layers, layer;

  __device__ int num_tokens() const { return min(query_starts[rows], tokens); }
  // A slot of the pools, or -1.
  __device__ int slot(int index) const { return index < num_slots ? index : -1; }
  // Where a layer's state is within a pool whose layers have `size` elements each.
  __device__ int64_t place(int slot, int64_t size) const { return (int64_t(slot) * num_layers + layer) * size; }
};

// Tokens of a row: [begin, end).
struct RowTokens {
  int row, begin, end;
};

// The row of a token, found by a warp together.
__device__ __forceinline__ RowTokens row_of(const SlotRows& slots, int token) {
  int before = 0;
  for (int row = int(threadIdx.x) % kWarp; row < slots.rows; row += kWarp) {
    before += slots.query_starts[row + 1] <= token ? 1 : 0;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) before += warp_shuffle_xor(before, mask);
  return {before, slots.query_starts[before], slots.query_starts[before + 1]};
}

// The n-th row with tokens, found by a block together; its row is -1 if there are not so many.
__device__ __forceinline__ RowTokens nth_row(const SlotRows& slots, int n) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  if (int(threadIdx.x) < kWarp) {
    const int lane = int(threadIdx.x), part = (slots.rows + kWarp - 1) / kWarp;
    const int first = min(lane * part, slots.rows), last = min(first + part, slots.rows);
    auto has_tokens = [&](int row) { return slots.query_starts[row + 1] > slots.query_starts[row]; };
    int own = 0;
    for (int row = first; row < last; row++) own += has_tokens(row) ? 1 : 0;
    int through = own;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = warp_shuffle(through, max(lane - step, 0));
      if (lane >= step) through += other;
    }
    int left = n - (through - own);
    for (int row = first; row < last && left >= 0 && left < own; row++) {
      if (has_tokens(row) && left-- == 0) found = row;
    }
  }
  __syncthreads();
  const int row = found;
  if (row < 0) return {-1, 0, 0};
  return {row, slots.query_starts[row], min(slots.query_starts[row + 1], slots.tokens)};
}

}  // namespace cadenza::cuda
