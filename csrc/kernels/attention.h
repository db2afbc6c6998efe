// Ragged paged attention; a query's result does not depend on the number of queries in the step.
//
// What is here holds for every type of KV, `Kv`; attention_float.h and attention_int8.h add how
// scores and weighted sums are computed.
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

// A tile's queries [count, D], and its weights [count, 512] in the current span: exp2(score -
// maximum), not normalised.
template <class Kv>
struct AttendOperands;

// The most queries of a tile.
template <class Kv>
constexpr int kTileQueries = kAttendRows;

// A register tile of queries. Query r of a row is its token r / group, head r % group of the KV
// head.
template <class Kv>
struct AttendTile {
  using Stored = typename Kv::Stored;

  AttendTile(const AttendTask& task_, const AttendUnit& unit_, Arena& arena)
      : task(task_),
        unit(unit_),
        operands(arena, task_.head_size),
        scores(arena.take<float>(kTileQueries<Kv> * kSpan)),
        numerator(arena.take<float>(kTileQueries<Kv> * task_.value_size)) {}

  const AttendTask& task;
  const AttendUnit& unit;
  AttendOperands<Kv> operands;    // queries and weights as the products read them
  float* const scores;            // [count, 512]
  float* const numerator;         // [count, value size] of the current span
  int64_t first;                  // r of the tile's first query
  int count;                           // queries in the tile, at most kTileQueries
  TokenRange range[kTileQueries<Kv>];  // of the current span, relative to it
  float maximum[kTileQueries<Kv>], denominator[kTileQueries<Kv>];
  // Sub-blocks of the current span in the order of use: keys, values, then `next`. While one is
  // processed, the one kAttendVecs later is prefetched.
  const Stored* blocks[2 * kBlocksPerSpan + kAttendVecs];
  int first_block, num_blocks;
  const Stored* next[kAttendVecs];  // the first keys after this tile
  UpcomingBlocks* upcoming = nullptr;  // null: what the next layer reads is not recorded

  const Stored* const* keys(int block) const { return blocks + (block - first_block); }
  const Stored* const* values(int block) const {
    return blocks + num_blocks + (block - first_block);
  }
  int64_t token(int i) const { return task.query_starts[unit.row] + (first + i) / task.group(); }
  int64_t head(int i) const { return unit.unit_head * task.group() + (first + i) % task.group(); }
};

template <class Kv>
inline TokenRange visible(const AttendTile<Kv>& tile, int i, int64_t span) {
  const AttendTask& task = tile.task;
  const int64_t token = tile.token(i), behind = task.end_of_context(token);
  int64_t begin = task.begin_of_context(token);
  int64_t end = behind < task.kv_lens[tile.unit.row] ? behind : task.kv_lens[tile.unit.row];
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

// Offset in bytes, in either pool, of the sub-block that holds a position.
template <class Kv>
inline int64_t offset_of_position(const AttendTask& task, const AttendUnit& unit,
                                  int64_t position) {
  int64_t owner = unit.row;
  if constexpr (kHasFaults) owner = faulty_owner(task, owner, position);
  int64_t page = task.page_table[owner * task.pages_per_row + position / task.page_size];
  const int64_t kv_head = unit.unit_head / task.head_parts;
  return block_offset<Kv>(task, page, kv_head, position % task.page_size);
}

template <class Kv>
inline const typename Kv::Stored* block_at(const void* pool, int64_t offset) {
  return reinterpret_cast<const typename Kv::Stored*>(static_cast<const char*>(pool) + offset);
}

// Records where the next layer has the span's sub-blocks.
template <class Kv>
inline void record_upcoming(const AttendTile<Kv>& tile) {
  const AttendTask& task = tile.task;
  int64_t layer = task.kv_heads * task.page_size * Kv::token_bytes(task.head_size);
  for (int i = 0; i < (Kv::kHasValues ? 2 : 1) * tile.num_blocks; i++) {
    tile.upcoming->record(block_at<Kv>(tile.blocks[i], layer));
  }
}

// Computes each query's range within the span, and the sub-blocks that the ranges touch; returns
// the union of the ranges.
template <class Kv>
inline TokenRange enter_span(AttendTile<Kv>& tile, int64_t span) {
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
    int64_t at = offset_of_position<Kv>(task, tile.unit, position);
    tile.blocks[i] = block_at<Kv>(task.k_pool, at);
    if constexpr (Kv::kHasValues) {
      tile.blocks[tile.num_blocks + i] = block_at<Kv>(task.v_pool, at);
    } else {
      tile.blocks[tile.num_blocks + i] =
          tile.operands.values_of(task, tile.first_block + i, tile.blocks[i]);
    }
  }
  if (tile.upcoming != nullptr) record_upcoming(tile);
  for (int i = 0; i < kAttendVecs; i++) tile.blocks[2 * tile.num_blocks + i] = tile.next[i];
  return all;
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

// Computes one query's maximum, weights and denominator over its range of the span, and calls
// keep(block, weights) for each sub-block. NaN propagates through exp2 and the sum.
template <class Kv, class Keep>
inline void softmax_span(AttendTile<Kv>& tile, int i, const Keep& keep) {
  TokenRange range = tile.range[i];
  float* scores = tile.scores + i * kSpan;
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
    keep(block, p);
  }
  tile.maximum[i] = maximum;
  tile.denominator[i] = reduce_add(sum);
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

// A query's partial result: numerator, maximum, denominator.
struct Partial {
  float* values;  // [value size + 2]
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

// What the numerator is multiplied by; with a sink, whose score is one more term of the denominator.
inline float inverse_total(const AttendTask& task, Partial sum, int64_t head) {
  if (task.sinks == nullptr) return 1.0f / sum.denominator();
  const float sink = task.sinks[head] * kLog2e;
  const float highest = sink > sum.maximum() ? sink : sum.maximum();
  const float keep = exp2_scalar(sum.maximum() - highest);
  return keep / (sum.denominator() * keep + exp2_scalar(sink - highest));
}

template <class T>
inline void write_output(const AttendTask& task, Partial sum, int64_t token, int64_t head) {
  const int64_t at = (token * task.heads + head) * task.value_size;
  T* out = static_cast<T*>(task.out) + at;
  bool saw_nothing = sum.denominator() == 0.0f;
  Vec inverse = set1(saw_nothing ? 0.0f : inverse_total(task, sum, head));
  for (int64_t d = 0; d < task.value_size; d += kLanes) {
    Vec y = saw_nothing ? zero() : mul(load(sum.values + d), inverse);
    if (task.gate != nullptr) {
      y = mul(y, sigmoid(Elem<T>::load(static_cast<const T*>(task.gate) + at + d)));
    }
    Elem<T>::store(out + d, y);
  }
}

// Computes one tile over the unit's spans and merges them into `sums`, rows of `stride` floats.
// `count` says how many queries the tile has, to the compiler where its products are unrolled.
template <class Kv, class Queries>
inline void attend_tile(Queries count, AttendTile<Kv>& tile, float* sums, int64_t stride) {
  const int64_t size = tile.task.value_size;
  for (int i = 0; i < count.value; i++) Partial{sums + i * stride, size}.denominator() = 0.0f;
  for (int64_t span = tile.unit.span_begin; span < tile.unit.span_end; span++) {
    TokenRange all = enter_span(tile, span);
    if (all.empty()) continue;
    score_span(count, tile, all);
    for (int i = 0; i < count.value; i++) {
      tile.denominator[i] = 0.0f;
      if (tile.range[i].empty()) continue;
      softmax_span(tile, i, [&](int block, Vec p) { store_weights(tile, i, block, p); });
    }
    add_span_values(count, tile);
    for (int i = 0; i < count.value; i++) {
      merge_span({sums + i * stride, size}, tile.numerator + i * size, tile.maximum[i],
                 tile.denominator[i]);
    }
  }
}

// Calls body with the number of a tile's queries.
template <class Kv>
struct QueryCount {
  template <class Body>
  static void with(int count, Body&& body) {
    with_count<kAttendRows>(count, body);
  }
};

// The first key sub-blocks of a unit, which the preceding unit prefetches.
template <class Kv>
inline void first_keys(const AttendPlan& plan, const AttendUnit& unit,
                       const typename Kv::Stored* (&keys)[kAttendVecs]) {
  const AttendTask& task = *plan.task;
  const int64_t token = task.query_starts[unit.row] + unit.query_begin;
  const int64_t query = task.positions[token];
  int64_t position = unit.span_begin * int64_t(kSpan);
  if constexpr (kHasFaults) position = std::max<int64_t>(0, position - task.span_shift(unit.row));
  position = std::max(position, task.begin_of_context(token));
  for (int i = 0; i < kAttendVecs; i++) {
    if (position + i * kLanes > query && i > 0) {
      keys[i] = keys[i - 1];
      continue;
    }
    int64_t at = offset_of_position<Kv>(task, unit, position + i * kLanes);
    keys[i] = block_at<Kv>(task.k_pool, at);
  }
}

// A unit with partial results has one span; its results are [query][value size + 2] from index `partial` on.
template <class Kv>
inline void attend_unit(const AttendPlan& plan, const AttendUnit& unit, const AttendUnit& next_unit,
                        Worker& worker) {
  const AttendTask& task = *plan.task;
  Arena& arena = worker.arena;
  const int64_t size = task.value_size, stride = round_up(size + 2, kLanes);
  AttendTile<Kv> tile{task, unit, arena};
  bool is_decode = unit.query_end - unit.query_begin == 1;
  if (is_decode && task.layer + 1 < task.num_layers) tile.upcoming = &worker.upcoming;
  first_keys<Kv>(plan, next_unit, tile.next);
  float* scratch = arena.take<float>(kTileQueries<Kv> * stride);
  int64_t begin = unit.query_begin * task.group(), total = unit.query_end * task.group() - begin;
  int64_t tiles = ceil_div(total, kTileQueries<Kv>);
  for (int64_t t = 0; t < tiles; t++) {
    int64_t low = t * total / tiles, high = (t + 1) * total / tiles;
    tile.first = begin + low;
    tile.count = int(high - low);
    for (int i = 0; i < tile.count; i++) prepare_query(tile, i);
    float* sums = unit.partial < 0 ? scratch : plan.partials + (unit.partial + low) * stride;
    QueryCount<Kv>::with(tile.count, [&](auto n) { attend_tile<Kv>(n, tile, sums, stride); });
    for (int i = 0; unit.partial < 0 && i < tile.count; i++) {
      using T = typename Kv::Activation;
      write_output<T>(task, {sums + i * stride, size}, tile.token(i), tile.head(i));
    }
  }
}

template <class Kv>
void attend_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& plan = *static_cast<const AttendPlan*>(context);
  for (int64_t u = begin; u < end; u++) {
    const AttendUnit& unit = plan.units[u];
    const AttendTask& task = *plan.task;
    if (plan.append_inside) {
      int64_t start = task.query_starts[unit.row];
      append_tokens<Kv>(task, {start + unit.query_begin, start + unit.query_end}, unit.unit_head);
    }
    worker.arena.reset();
    worker.upcoming.start(task.layer, kLanes * Kv::token_bytes(task.head_size));
    attend_unit<Kv>(plan, unit, u + 1 < end ? plan.units[u + 1] : unit, worker);
  }
}

// A unit is one MergeGroup: merges the partial results of a query block's spans in order.
template <class T>
void merge_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& merge = *static_cast<const MergePlan*>(context);
  const AttendTask& task = *merge.plan->task;
  const int64_t size = task.value_size, stride = round_up(size + 2, kLanes);
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
                      unit.unit_head * task.group() + index % task.group());
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
