// Ragged paged attention; a query's result does not depend on the number of queries in the step.
//
// A row's KV is partitioned into softmax spans of 512 tokens at absolute positions. Within a span a
// query has one maximum, one sum and one numerator, reduced in ascending order over absolute
// sub-blocks of sixteen tokens; spans are merged in order. Lanes outside a query's range are
// masked, not multiplied by zero, so NaN in them cannot propagate.
#pragma once

#include <algorithm>

#include "kernels/kv.h"
#include "kernels/micro.h"

namespace cadenza::CADENZA_ISA {

constexpr int kBlocksPerSpan = kSpan / kLanes;
constexpr float kLog2e = 1.44269504f;

struct TokenRange {
  int32_t begin, end;
  bool empty() const { return end <= begin; }
};

// A register tile of queries. Query r of a row is its token r / group, head r % group of the KV
// head.
template <class T>
struct AttendTile {
  AttendTile(const AttendTask& task_, const AttendUnit& unit_, Arena& arena)
      : task(task_),
        unit(unit_),
        queries(arena.take<Input<T>>(kAttendRows * task_.head_size)),
        scores(arena.take<float>(kAttendRows * kSpan)),
        weights(arena.take<Input<T>>(kAttendRows * kSpan)),
        numerator(arena.take<float>(kAttendRows * task_.head_size)) {}

  const AttendTask& task;
  const AttendUnit& unit;
  Input<T>* const queries;               // [count, D]
  float* const scores;            // [count, 512]
  Input<T>* const weights;               // [count, 512]: exp2(score - maximum), not normalised
  float* const numerator;         // [count, D] of the current span
  int64_t first;                  // r of the tile's first query
  int count;                      // queries in the tile, at most kAttendRows
  TokenRange range[kAttendRows];  // of the current span, relative to it
  float maximum[kAttendRows], denominator[kAttendRows];
  // Sub-blocks of the current span in the order of use: keys, values, then `next`. While one is
  // processed, the one kAttendVecs later is prefetched.
  const T* blocks[2 * kBlocksPerSpan + kAttendVecs];
  int first_block, num_blocks;
  const T* next[kAttendVecs];  // the first keys after this tile
  UpcomingBlocks* upcoming = nullptr;  // null: what the next layer reads is not recorded

  const T* const* keys(int block) const { return blocks + (block - first_block); }
  const T* const* values(int block) const { return blocks + num_blocks + (block - first_block); }
  int64_t token(int i) const { return task.query_starts[unit.row] + (first + i) / task.group(); }
  int64_t head(int i) const { return unit.kv_head * task.group() + (first + i) % task.group(); }
};

template <class T>
inline TokenRange visible(const AttendTile<T>& tile, int i, int64_t span) {
  const AttendTask& task = tile.task;
  int64_t position = task.positions[tile.token(i)];
  int64_t begin = task.window > 0 ? position - task.window + 1 : 0;
  int64_t end =
      position + 1 < task.kv_lens[tile.unit.row] ? position + 1 : task.kv_lens[tile.unit.row];
  int64_t start = span * kSpan;
  if constexpr (kHasFaults) start -= task.span_shift(tile.unit.row);
  begin = begin < start ? 0 : begin - start;
  end = end > start + kSpan ? kSpan : end - start;
  return {int32_t(begin), int32_t(end)};
}

// The row whose pages an injected fault reads for a position: another row of the step that holds
// the position, or the row itself if there is none.
inline int64_t faulty_owner(const AttendTask& task, int64_t row, int64_t position) {
  bool near = has_fault(Fault::kNeighbourPage) && position >= kLanes && position < 2 * kLanes;
  bool far = has_fault(Fault::kNeighbourPagesFar) && position >= 640;
  for (int64_t other = 0; (near || far) && other < task.rows; other++) {
    bool takes_part = task.query_starts[other + 1] > task.query_starts[other];
    if (other != row && takes_part && task.kv_lens[other] >= position + kLanes) return other;
  }
  return row;
}

// Offset in the pools of the sub-block that holds a position.
template <class T>
inline int64_t offset_of_position(const AttendTask& task, const AttendUnit& unit,
                                  int64_t position) {
  int64_t owner = unit.row;
  if constexpr (kHasFaults) owner = faulty_owner(task, owner, position);
  int64_t page = task.page_table[owner * task.pages_per_row + position / task.page_size];
  return block_offset<T>(task, page, unit.kv_head, position % task.page_size);
}

// Records where the next layer has the span's sub-blocks.
template <class T>
inline void record_upcoming(const AttendTile<T>& tile) {
  int64_t layer = tile.task.kv_heads * tile.task.page_size * tile.task.head_size;
  for (int i = 0; i < 2 * tile.num_blocks; i++) tile.upcoming->record(tile.blocks[i] + layer);
}

// Computes each query's range within the span, and the sub-blocks that the ranges touch; returns
// the union of the ranges.
template <class T>
inline TokenRange enter_span(AttendTile<T>& tile, int64_t span) {
  TokenRange all{kSpan, 0};
  for (int i = 0; i < tile.count; i++) {
    TokenRange mine = tile.range[i] = visible(tile, i, span);
    if (mine.empty()) continue;
    if (mine.begin < all.begin) all.begin = mine.begin;
    if (mine.end > all.end) all.end = mine.end;
  }
  if (all.empty()) return all;
  const AttendTask& task = tile.task;
  tile.first_block = all.begin / kLanes;
  tile.num_blocks = (all.end + kLanes - 1) / kLanes - tile.first_block;
  for (int i = 0; i < tile.num_blocks; i++) {
    int64_t position = span * kSpan + (tile.first_block + i) * kLanes;
    if constexpr (kHasFaults) position -= task.span_shift(tile.unit.row);
    int64_t at = offset_of_position<T>(task, tile.unit, position);
    tile.blocks[i] = static_cast<const T*>(task.k_pool) + at;
    tile.blocks[tile.num_blocks + i] = static_cast<const T*>(task.v_pool) + at;
  }
  if (tile.upcoming != nullptr) record_upcoming(tile);
  for (int i = 0; i < kAttendVecs; i++) tile.blocks[2 * tile.num_blocks + i] = tile.next[i];
  return all;
}

template <class T, int MR, int NR>
[[gnu::always_inline]] inline void score_blocks(AttendTile<T>& tile, int block) {
  const T* keys[NR];
  for (int j = 0; j < NR; j++) keys[j] = tile.keys(block)[j];
  Vec acc[MR][NR];
  clear(acc);
  int64_t size = tile.task.head_size;
  accumulate<T, MR, NR>(acc, tile.queries, size, size / kStep<T>, keys, kLanes * kStep<T>, {},
                        tile.keys(block) + kAttendVecs);
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) {
      store(tile.scores + i * kSpan + (block + j) * kLanes, acc[i][j]);
    }
}

template <class T, int MR>
inline void score_span(AttendTile<T>& tile, TokenRange all) {
  int block = all.begin / kLanes, end = (all.end + kLanes - 1) / kLanes;
  constexpr int NR = tile_vecs<MR>(kAttendVecs);
  for (; block + NR <= end; block += NR) score_blocks<T, MR, NR>(tile, block);
  for (; block < end; block++) score_blocks<T, MR, 1>(tile, block);
}

// The lanes of a sub-block within a query's range.
inline Mask owned_lanes(TokenRange range, int block) {
  int begin = range.begin - block * kLanes, end = range.end - block * kLanes;
  Mask before_end = first(end < 0 ? 0 : end);
  return begin <= 0 ? before_end : mask_and(before_end, mask_not(first(begin)));
}

inline bool is_full_block(TokenRange range, int block) {
  return block * kLanes >= range.begin && (block + 1) * kLanes <= range.end;
}

// Scores scaled for exp2 (times log2 e), after the soft cap if the model has one.
inline Vec scaled_score(const AttendTask& task, Vec score) {
  if (task.soft_cap == 0.0f) return mul(score, set1(task.scale * kLog2e));
  Vec capped = tanh_vec(mul(score, set1(task.scale / task.soft_cap)));
  return mul(capped, set1(task.soft_cap * kLog2e));
}

// Computes one query's maximum, weights and denominator over its range of the span. NaN propagates
// through exp2 and the sum.
template <class T>
inline void softmax_span(AttendTile<T>& tile, int i) {
  TokenRange range = tile.range[i];
  float* scores = tile.scores + i * kSpan;
  Input<T>* weights = tile.weights + i * kSpan;
  int first_block = range.begin / kLanes, last = (range.end + kLanes - 1) / kLanes;
  const Vec no_score = set1(-__builtin_inff());
  Vec largest = no_score;
  for (int block = first_block; block < last; block++) {
    Vec score = scaled_score(tile.task, load(scores + block * kLanes)), unmasked = score;
    if (!is_full_block(range, block)) score = select(owned_lanes(range, block), score, no_score);
    store(scores + block * kLanes, score);
    if constexpr (kHasFaults) {
      if (has_fault(Fault::kMultipliedPadding)) store(scores + block * kLanes, unmasked);
    }
    largest = max(score, largest);
  }
  float maximum = reduce_max(largest);
  Vec sum = zero();
  for (int block = first_block; block < last; block++) {
    Vec p = exp2_vec(sub(load(scores + block * kLanes), set1(maximum))), unmasked = p;
    if (!is_full_block(range, block)) p = select(owned_lanes(range, block), p, zero());
    if constexpr (kHasFaults) {
      if (has_fault(Fault::kMultipliedPadding)) p = add(p, mul(unmasked, zero()));
    }
    sum = add(sum, p);
    Elem<T>::store_input(weights + block * kLanes, p);
  }
  tile.maximum[i] = maximum;
  tile.denominator[i] = reduce_add(sum);
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

template <int MR, int NR>
[[gnu::always_inline]] inline void load_tile(Vec (&acc)[MR][NR], const float* from,
                                             int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) acc[i][j] = load(from + i * stride + j * kLanes);
}
template <int MR, int NR>
[[gnu::always_inline]] inline void store_tile(const Vec (&acc)[MR][NR], float* to, int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) store(to + i * stride + j * kLanes, acc[i][j]);
}

// numerator[i][d..] += weights · values, over steps within the range of every query of the tile.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void add_values(AttendTile<T>& tile, StepRange<T> steps, int64_t d) {
  constexpr int kSteps = kLanes / kStep<T>;
  const int64_t size = tile.task.head_size;
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
    accumulate<T, MR, NR>(acc, tile.weights + step * kStep<T>, kSpan, count, columns,
                          size * kStep<T>, {}, next_values);
    step += count;
  }
  store_tile(acc, tile.numerator + d, size);
}

// The same for one query, over steps at the ends of its range; values outside the range are loaded
// as zero.
template <class T>
inline void add_edge_values(AttendTile<T>& tile, int i, StepRange<T> steps) {
  constexpr int kSteps = kLanes / kStep<T>;
  const int64_t size = tile.task.head_size;
  TokenRange range = tile.range[i];
  for (int step = steps.begin; step < steps.end; step++) {
    int token = step * kStep<T>;
    bool keep_first = token >= range.begin && token < range.end;
    bool keep_second = token + 1 >= range.begin && token + 1 < range.end;
    const T* values = tile.values(step / kSteps)[0] + step % kSteps * size * kStep<T>;
    for_each_product<T>([&](auto p) {
      constexpr int P = decltype(p)::value;
      auto operand = Elem<T>::broadcast(tile.weights + i * kSpan + token + P);
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
template <class T, int MR>
inline void add_span_values(AttendTile<T>& tile) {
  StepRange<T> shared{0, kSpan};
  for (int i = 0; i < MR; i++) {
    StepRange<T> whole = full_steps<T>(tile.range[i]);
    if (whole.begin > shared.begin) shared.begin = whole.begin;
    if (whole.end < shared.end) shared.end = whole.end;
  }
  bool none = shared.end <= shared.begin;
  const int64_t size = tile.task.head_size;
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

// A query's partial result: numerator, maximum, denominator.
struct Partial {
  float* values;  // [D + 2]
  int64_t size;
  float& maximum() const { return values[size]; }
  float& denominator() const { return values[size + 1]; }
};

inline float exp2_scalar(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, exp2_vec(set1(x)));
  return lanes[0];
}

// Merges the next span into `sum`. The first is copied, so splitting a row by spans gives the same
// bits. A span outside the query's range has a denominator of zero and is skipped.
inline void merge_span(Partial sum, const float* numerator, float maximum, float denominator) {
  if (denominator == 0.0f) return;
  if (sum.denominator() == 0.0f) {
    for (int64_t d = 0; d < sum.size; d += kLanes) store(sum.values + d, load(numerator + d));
    sum.denominator() = denominator;
    sum.maximum() = maximum;
    return;
  }
  float highest = maximum > sum.maximum() ? maximum : sum.maximum();
  float keep = exp2_scalar(sum.maximum() - highest), scale = exp2_scalar(maximum - highest);
  for (int64_t d = 0; d < sum.size; d += kLanes) {
    Vec old = mul(load(sum.values + d), set1(keep));
    store(sum.values + d, add(old, mul(load(numerator + d), set1(scale))));
  }
  sum.denominator() = sum.denominator() * keep + denominator * scale;
  sum.maximum() = highest;
}

template <class T>
inline void write_output(const AttendTask& task, Partial sum, int64_t token, int64_t head) {
  T* out = static_cast<T*>(task.out) + (token * task.heads + head) * task.head_size;
  bool saw_nothing = sum.denominator() == 0.0f;
  Vec inverse = set1(saw_nothing ? 0.0f : 1.0f / sum.denominator());
  for (int64_t d = 0; d < task.head_size; d += kLanes) {
    Elem<T>::store(out + d, saw_nothing ? zero() : mul(load(sum.values + d), inverse));
  }
}

// Computes one tile over the unit's spans and merges them into `sums`, [MR] rows of `stride`
// floats.
template <class T, int MR>
inline void attend_tile(AttendTile<T>& tile, float* sums, int64_t stride) {
  const int64_t size = tile.task.head_size;
  for (int i = 0; i < MR; i++) Partial{sums + i * stride, size}.denominator() = 0.0f;
  for (int64_t span = tile.unit.span_begin; span < tile.unit.span_end; span++) {
    TokenRange all = enter_span(tile, span);
    if (all.empty()) continue;
    score_span<T, MR>(tile, all);
    for (int i = 0; i < MR; i++) {
      tile.denominator[i] = 0.0f;
      if (!tile.range[i].empty()) softmax_span(tile, i);
    }
    add_span_values<T, MR>(tile);
    for (int i = 0; i < MR; i++) {
      merge_span({sums + i * stride, size}, tile.numerator + i * size, tile.maximum[i],
                 tile.denominator[i]);
    }
  }
}

// The first key sub-blocks of a unit, which the preceding unit prefetches.
template <class T>
inline void first_keys(const AttendPlan& plan, const AttendUnit& unit,
                       const T* (&keys)[kAttendVecs]) {
  const AttendTask& task = *plan.task;
  int64_t query = task.positions[task.query_starts[unit.row] + unit.query_begin];
  int64_t position = unit.span_begin * int64_t(kSpan);
  if constexpr (kHasFaults) position = std::max<int64_t>(0, position - task.span_shift(unit.row));
  if (task.window > 0 && query - task.window + 1 > position) position = query - task.window + 1;
  for (int i = 0; i < kAttendVecs; i++) {
    if (position + i * kLanes > query && i > 0) {
      keys[i] = keys[i - 1];
      continue;
    }
    int64_t at = offset_of_position<T>(task, unit, position + i * kLanes);
    keys[i] = static_cast<const T*>(task.k_pool) + at;
  }
}

// A unit with partial results has one span; its results are [query][D + 2] from index `partial` on.
template <class T>
inline void attend_unit(const AttendPlan& plan, const AttendUnit& unit, const AttendUnit& next_unit,
                        Worker& worker) {
  const AttendTask& task = *plan.task;
  Arena& arena = worker.arena;
  const int64_t size = task.head_size, stride = round_up(size + 2, kLanes);
  AttendTile<T> tile{task, unit, arena};
  bool is_decode = unit.query_end - unit.query_begin == 1;
  if (is_decode && task.layer + 1 < task.num_layers) tile.upcoming = &worker.upcoming;
  first_keys(plan, next_unit, tile.next);
  float* scratch = arena.take<float>(kAttendRows * stride);
  int64_t begin = unit.query_begin * task.group(), total = unit.query_end * task.group() - begin;
  int64_t tiles = ceil_div(total, kAttendRows);
  for (int64_t t = 0; t < tiles; t++) {
    int64_t low = t * total / tiles, high = (t + 1) * total / tiles;
    tile.first = begin + low;
    tile.count = int(high - low);
    for (int i = 0; i < tile.count; i++) {
      Input<T>* query = tile.queries + i * size;
      prepare_head<T>(task, tile.token(i), tile.head(i), [&](int64_t d, Vec values) {
        Elem<T>::store_input(query + d, values);
      });
    }
    float* sums = unit.partial < 0 ? scratch : plan.partials + (unit.partial + low) * stride;
    with_count<kAttendRows>(
        tile.count, [&](auto n) { attend_tile<T, decltype(n)::value>(tile, sums, stride); });
    for (int i = 0; unit.partial < 0 && i < tile.count; i++) {
      write_output<T>(task, {sums + i * stride, size}, tile.token(i), tile.head(i));
    }
  }
}

template <class T>
void attend_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& plan = *static_cast<const AttendPlan*>(context);
  for (int64_t u = begin; u < end; u++) {
    const AttendUnit& unit = plan.units[u];
    const AttendTask& task = *plan.task;
    if (plan.append_inside) {
      int64_t start = task.query_starts[unit.row];
      append_tokens<T>(task, start + unit.query_begin, start + unit.query_end, unit.kv_head);
    }
    worker.arena.reset();
    worker.upcoming.start(task.layer, kLanes * task.head_size * int64_t(sizeof(T)));
    attend_unit<T>(plan, unit, u + 1 < end ? plan.units[u + 1] : unit, worker);
  }
}

// A unit is one MergeGroup: merges the partial results of a query block's spans in order.
template <class T>
void merge_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& merge = *static_cast<const MergePlan*>(context);
  const AttendTask& task = *merge.plan->task;
  const int64_t size = task.head_size, stride = round_up(size + 2, kLanes);
  worker.arena.reset();
  Partial sum{worker.arena.take<float>(stride), size};
  for (int64_t g = begin; g < end; g++) {
    const AttendUnit& unit = merge.plan->units[merge.groups[g].first_unit];
    int64_t queries = (unit.query_end - unit.query_begin) * task.group();
    for (int64_t r = 0; r < queries; r++) {
      sum.denominator() = 0.0f;
      for (int64_t s = 0; s < merge.groups[g].num_units; s++) {
        int64_t at = merge.plan->units[merge.groups[g].first_unit + s].partial + r;
        Partial part{merge.plan->partials + at * stride, size};
        merge_span(sum, part.values, part.maximum(), part.denominator());
      }
      int64_t index = unit.query_begin * task.group() + r;
      write_output<T>(task, sum, task.query_starts[unit.row] + index / task.group(),
                      unit.kv_head * task.group() + index % task.group());
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
