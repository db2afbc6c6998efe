// Attention over KV in the type of the activations: products of f32, or of pairs of bf16.
#pragma once

#include "kernels/attention.h"

namespace cadenza::CADENZA_ISA {

template <class T>
struct AttendOperands<FloatKv<T>> {
  AttendOperands(Arena& arena, int64_t head_size)
      : queries(arena.take<Input<T>>(kAttendRows * head_size)),
        weights(arena.take<Input<T>>(kAttendRows * kSpan)) {}

  Input<T>* const queries;
  Input<T>* const weights;
};

template <class T>
inline void prepare_query(AttendTile<FloatKv<T>>& tile, int i) {
  Input<T>* query = tile.operands.queries + i * tile.task.head_size;
  prepare_head<T>(tile.task, tile.token(i), tile.head(i), [&](int64_t d, Vec values) {
    Elem<T>::store_input(query + d, values);
  });
}

template <class T, bool V>
inline void store_weights(AttendTile<FloatKv<T, V>>& tile, int i, int block, Vec p) {
  Elem<T>::store_input(tile.operands.weights + i * kSpan + block * kLanes, p);
}

template <class T, int MR, int NR, bool V>
[[gnu::always_inline]] inline void score_blocks(AttendTile<FloatKv<T, V>>& tile, int block) {
  const T* keys[NR];
  for (int j = 0; j < NR; j++) keys[j] = tile.keys(block)[j];
  Vec acc[MR][NR];
  clear(acc);
  int64_t size = tile.task.head_size;
  accumulate<T, MR, NR>(acc, tile.operands.queries, size, size / kStep<T>, keys,
                        kLanes * kStep<T>, {}, tile.keys(block) + kAttendVecs);
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) {
      store(tile.scores + i * kSpan + (block + j) * kLanes, acc[i][j]);
    }
}

template <class T, int MR, bool V>
inline void score_span(Count<MR>, AttendTile<FloatKv<T, V>>& tile, TokenRange all) {
  int block = all.begin / kLanes, end = (all.end + kLanes - 1) / kLanes;
  constexpr int NR = tile_vecs<MR>(kAttendVecs);
  for (; block + NR <= end; block += NR) score_blocks<T, MR, NR>(tile, block);
  for (; block < end; block++) score_blocks<T, MR, 1>(tile, block);
}

// A range of steps along the tokens; for bf16 a step is a pair of tokens. A range of tokens touches
// some steps, and covers some of these completely.
template <class T>
struct StepRange {
  int begin, end;
};
template <class T>
inline StepRange<T> touched_steps(TokenRange r) {
  return {r.begin / kStep<T>, (r.end + kStep<T> - 1) / kStep<T>};
}
template <class T>
inline StepRange<T> full_steps(TokenRange r) {
  return {(r.begin + kStep<T> - 1) / kStep<T>, r.end / kStep<T>};
}

// numerator[i][d..] += weights · values, over steps within the range of every query of the tile.
template <class T, int MR, int NR, bool V>
[[gnu::always_inline]] inline void add_values(AttendTile<FloatKv<T, V>>& tile, StepRange<T> steps,
                                              int64_t d) {
  constexpr int kSteps = kLanes / kStep<T>;
  const int64_t size = tile.task.value_size;
  Vec acc[MR][NR];
  load_tile(acc, tile.numerator + d, size);
  for (int step = steps.begin; step < steps.end;) {
    int block = step / kSteps, within = step % kSteps;
    int count = steps.end - step < kSteps - within ? steps.end - step : kSteps - within;
    const T *columns[NR], *next_values[NR];
    for (int j = 0; j < NR; j++) {
      int64_t at = (within * size + d + j * kLanes) * kStep<T>;
      columns[j] = tile.values(block)[0] + at;
      next_values[j] = tile.values(block)[kAttendVecs] + at;
    }
    accumulate<T, MR, NR>(acc, tile.operands.weights + step * kStep<T>, kSpan, count, columns,
                          size * kStep<T>, {}, next_values);
    step += count;
  }
  store_tile(acc, tile.numerator + d, size);
}

// The same for one query, over steps at the ends of its range; values outside the range are loaded
// as zero.
template <class T, bool V>
inline void add_edge_values(AttendTile<FloatKv<T, V>>& tile, int i, StepRange<T> steps) {
  constexpr int kSteps = kLanes / kStep<T>;
  const int64_t size = tile.task.value_size;
  TokenRange range = tile.range[i];
  for (int step = steps.begin; step < steps.end; step++) {
    int token = step * kStep<T>;
    bool keep_first = token >= range.begin && token < range.end;
    bool keep_second = token + 1 >= range.begin && token + 1 < range.end;
    const T* values = tile.values(step / kSteps)[0] + step % kSteps * size * kStep<T>;
    for_each_product<T>([&](auto p) {
      constexpr int P = decltype(p)::value;
      auto operand = Elem<T>::broadcast(tile.operands.weights + i * kSpan + token + P);
      for (int64_t d = 0; d < size; d += kLanes) {
        float* at = tile.numerator + i * size + d;
        auto column =
            Elem<T>::template weight_masked<P>(values + d * kStep<T>, keep_first, keep_second);
        store(at, Elem<T>::multiply_add(load(at), column, operand));
      }
    });
  }
}

// Each query adds its steps in ascending order: those before the steps shared by all queries of the
// tile, the shared steps, then the rest. If any query has an empty range, no steps are shared.
template <class T, int MR, bool V>
inline void add_span_values(Count<MR>, AttendTile<FloatKv<T, V>>& tile) {
  StepRange<T> shared{0, kSpan};
  for (int i = 0; i < MR; i++) {
    StepRange<T> whole = full_steps<T>(tile.range[i]);
    if (whole.begin > shared.begin) shared.begin = whole.begin;
    if (whole.end < shared.end) shared.end = whole.end;
  }
  bool none = shared.end <= shared.begin;
  const int64_t size = tile.task.value_size;
  for (int i = 0; i < MR; i++) {
    for (int64_t d = 0; d < size; d += kLanes) store(tile.numerator + i * size + d, zero());
    if (tile.range[i].empty()) continue;
    StepRange<T> mine = touched_steps<T>(tile.range[i]);
    add_edge_values(tile, i, {mine.begin, none ? mine.end : shared.begin});
  }
  if (none) return;
  int64_t d = 0;
  constexpr int NR = tile_vecs<MR>(kAttendVecs);
  for (; d + NR * kLanes <= size; d += NR * kLanes) add_values<T, MR, NR>(tile, shared, d);
  for (; d < size; d += kLanes) add_values<T, MR, 1>(tile, shared, d);
  for (int i = 0; i < MR; i++) {
    add_edge_values(tile, i, {shared.end, touched_steps<T>(tile.range[i]).end});
  }
}

}  // namespace cadenza::CADENZA_ISA
