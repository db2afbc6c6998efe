// Attention of an image tower: queries of an image over its rows, without pages. A query's result
// does not depend on the block of queries or on the unit in which it is computed.
//
// Softmax spans of 512 rows begin at the image's first row. Within a span a query has one maximum,
// one sum and one numerator, reduced in ascending order over the blocks of sixteen rows that its own
// bounds touch; spans are merged in order. Queries of a unit with equal bounds are computed together.
// Rows outside the bounds have a weight of zero; those behind the image are read as zero, since their
// memory may hold anything.
#pragma once

#include "core/encoder_tasks.h"
#include "kernels/attention.h"

namespace cadenza::CADENZA_ISA {

// Stores a head of `size` elements from `work`.
template <class T>
inline void store_head(const float* work, int64_t size, T* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = int(size - i < kLanes ? size - i : kLanes);
    store_some(to + i, load_some(work + i, n), n);
  }
}

// Norms a head in place; `weight` null: by the RMS alone.
inline void norm_encoder_head(const KeepHeadsTask& task, const float* weight, float* work) {
  const int64_t size = task.kept.head_size;
  const Vec inverse = set1(inverse_rms(work, size, task.norm_eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = int(size - i < kLanes ? size - i : kLanes);
    Vec y = mul(load_some(work + i, n), inverse);
    if (weight != nullptr) y = mul(y, load_some(weight + i, n));
    store_some(work + i, y, n);
  }
}

inline void turn_head(const KeepHeadsTask& task, int64_t row, float* head) {
  const int64_t half = task.rotary_size / 2;
  const float* cosine = task.turns + row * task.rotary_size;
  const float* sine = cosine + half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = int(half - i < kLanes ? half - i : kLanes);
    const Vec a = load_some(head + i, n), b = load_some(head + half + i, n);
    const Vec c = load_some(cosine + i, n), s = load_some(sine + i, n);
    store_some(head + i, fnma(b, s, mul(a, c)), n);
    store_some(head + half + i, fma(a, s, mul(b, c)), n);
  }
}

enum class HeadSide { kQuery, kKey, kValue };

// Makes a head of one side of a block's row, as it is kept, in `head` [D].
template <class T>
inline void make_head(const KeepHeadsTask& task, int64_t row, int64_t head_index, HeadSide side,
                      T* head) {
  alignas(64) float work[kMaxHeadSize];
  const int64_t size = task.kept.head_size;
  const T* raw = static_cast<const T*>(task.qkv) +
                 ((row * 3 + int64_t(side)) * task.kept.heads + head_index) * size;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = int(size - i < kLanes ? size - i : kLanes);
    store_some(work + i, load_some(raw + i, n), n);
  }
  const float* weight = side == HeadSide::kQuery ? task.q_weight : task.k_weight;
  if (side == HeadSide::kValue) {
    if (task.norms_values) norm_encoder_head(task, nullptr, work);
  } else {
    if (weight != nullptr) norm_encoder_head(task, weight, work);
    if (task.turns != nullptr) turn_head(task, row, work);
  }
  store_head(work, size, head);
}

template <class T>
inline T* key_block(const EncoderHeads& kept, int64_t head, int64_t block) {
  return static_cast<T*>(kept.keys) + (head * kept.rows + block * kLanes) * kept.head_size;
}

template <class T>
inline T* value_block(const EncoderHeads& kept, int64_t head, int64_t block) {
  return static_cast<T*>(kept.values) + (head * kept.rows + block * kLanes) * kept.value_columns();
}

// Writes a row's key as words, of `step` elements that the row has to itself.
template <class T>
inline void keep_key(const EncoderHeads& kept, int64_t head, int64_t row, const T* key) {
  auto* to = reinterpret_cast<char*>(key_block<T>(kept, head, row / kLanes)) + row % kLanes * 4;
  for (int64_t i = 0; i < kept.head_size; i += kStep<T>, to += kLanes * 4) {
    __builtin_memcpy(to, key + i, 4);
  }
}

// Writes a row's value by elements: another thread may write the other row of the same word.
template <class T>
inline void keep_value(const EncoderHeads& kept, int64_t head, int64_t row, const T* value) {
  const int64_t lane = row % kLanes, columns = kept.value_columns();
  T* to = value_block<T>(kept, head, row / kLanes) + lane / kStep<T> * columns * kStep<T> +
          lane % kStep<T>;
  for (int64_t i = 0; i < kept.head_size; i++) to[i * kStep<T>] = value[i];
  for (int64_t i = kept.head_size; i < columns; i++) to[i * kStep<T>] = T{};
}

// A unit is one row with all heads.
template <class T>
void keep_heads_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const KeepHeadsTask*>(context);
  const EncoderHeads& kept = task.kept;
  alignas(64) T head[kMaxHeadSize];
  for (int64_t row = begin; row < end; row++) {
    const int64_t at = task.start + row;
    for (int64_t h = 0; h < kept.heads; h++) {
      T* queries = static_cast<T*>(kept.queries) + (h * kept.rows + at) * kept.head_size;
      make_head(task, row, h, HeadSide::kQuery, queries);
      make_head(task, row, h, HeadSide::kKey, head);
      keep_key(kept, h, at, head);
      make_head(task, row, h, HeadSide::kValue, head);
      keep_value(kept, h, at, head);
    }
  }
}

// Blocks of rows whose values are multiplied while they are in the first-level cache.
constexpr int kEncodeBlocks = 8;

// Elements from one query to the next, not a multiple of 4096 bytes apart: such rows share one set of
// the first-level cache.
constexpr int kScoreStride = kSpan + kLanes, kWeightStride = kSpan + 2 * kLanes;

// What is read after the rows at hand, prefetched a line a step of their products.
class NextRows {
 public:
  NextRows(const void* at, int64_t bytes) : at_(static_cast<const char*>(at)), left_(bytes) {}

  // The share of a product of so many steps.
  SpreadPrefetch take(int64_t steps) {
    if (left_ <= 0) return {};
    const SpreadPrefetch share{at_, kCacheLine, CacheLevels::kFirst};
    at_ += steps * kCacheLine, left_ -= steps * kCacheLine;
    return share;
  }

 private:
  const char* at_;
  int64_t left_;
};

// Queries of one head with equal bounds, and what is known of them in the current span.
template <class T>
struct EncodeTile {
  EncodeTile(const EncodeTask& task_, int64_t head_, Arena& arena)
      : task(task_),
        head(head_),
        columns(task_.kept.value_columns()),
        stride(columns + kLanes),
        queries(arena.take<Input<T>>(kEncodeQueries * task_.kept.head_size)),
        weights(arena.take<Input<T>>(kEncodeQueries * kWeightStride)),
        scores(arena.take<float>(kEncodeQueries * kScoreStride)),
        numerator(arena.take<float>(kEncodeQueries * columns)),
        sums(arena.take<float>(kEncodeQueries * stride)),
        last_values(arena.take<T>(kLanes * columns)) {}

  const EncodeTask& task;
  const int64_t head, columns;
  const int64_t stride;      // of sums
  Input<T>* const queries;   // [count, D]
  Input<T>* const weights;   // [count, kWeightStride]: exp2(score - maximum), not normalised
  float* const scores;       // [count, kScoreStride]
  float* const numerator;    // [count, columns] of the current span
  float* const sums;         // [count, columns, then maximum and denominator] of all spans so far
  T* const last_values;      // the image's last block of values, zero behind the last row
  int count;
  TokenRange bounds;  // the rows that each query sees
  int64_t span;
  TokenRange range;   // those in the span, relative to it
  float maximum[kEncodeQueries], denominator[kEncodeQueries];

  int first_block() const { return range.begin / kLanes; }
  int end_block() const { return int(ceil_div(range.end, kLanes)); }
  int64_t block_of_image(int block) const { return span * (kSpan / kLanes) + block; }
};

// Splits the queries into register tiles of equal size, and calls body(Count, first query) for each.
template <class Body>
inline void for_each_tile(int count, Body&& body) {
  const int tiles = int(ceil_div(count, kAttendRows));
  for (int t = 0; t < tiles; t++) {
    const int low = t * count / tiles, high = (t + 1) * count / tiles;
    with_count<kAttendRows>(high - low, [&](auto n) { body(n, low); });
  }
}

template <class T, int MR, int NR>
[[gnu::always_inline]] inline void score_tile(const EncodeTile<T>& tile, int first, int block,
                                              NextRows& next) {
  const int64_t size = tile.task.kept.head_size;
  const T* keys[NR];
  for (int j = 0; j < NR; j++) {
    keys[j] = key_block<T>(tile.task.kept, tile.head, tile.block_of_image(block + j));
  }
  Vec acc[MR][NR];
  clear(acc);
  accumulate<T, MR, NR>(acc, tile.queries + first * size, size, size / kStep<T>, keys,
                        kLanes * kStep<T>, next.take(size / kStep<T>));
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NR; j++) {
      store(tile.scores + (first + i) * kScoreStride + (block + j) * kLanes, acc[i][j]);
    }
}

// The scores of all queries, for a few blocks of keys at a time, which stay in the first-level cache.
template <class T>
inline void score_rows(const EncodeTile<T>& tile) {
  const int end = tile.end_block();
  for (int block = tile.first_block(); block < end;) {
    const bool is_wide = end - block >= kAttendVecs;
    const int taken = is_wide ? kAttendVecs : 1;
    const int64_t bytes = taken * kLanes * tile.task.kept.head_size * int64_t(sizeof(T));
    NextRows next(key_block<T>(tile.task.kept, tile.head, tile.block_of_image(block + taken)), bytes);
    for_each_tile(tile.count, [&](auto n, int first) {
      constexpr int MR = decltype(n)::value, NR = tile_vecs<MR>(kAttendVecs);
      if (!is_wide) return score_tile<T, MR, 1>(tile, first, block, next);
      for (int j = 0; j < kAttendVecs; j += NR) score_tile<T, MR, NR>(tile, first, block + j, next);
    });
    block += taken;
  }
}

// A query's maximum, weights and denominator in the span. NaN propagates through exp2 and the sum.
template <class T>
inline void weigh_rows(EncodeTile<T>& tile, int i) {
  float* scores = tile.scores + i * kScoreStride;
  const int first_block = tile.first_block(), end = tile.end_block();
  const Vec no_score = set1(-__builtin_inff());
  Vec largest = no_score;
  for (int block = first_block; block < end; block++) {
    Vec score = load(scores + block * kLanes);
    if (!is_full_block(tile.range, block)) {
      score = select(owned_lanes(tile.range, block), score, no_score);
      store(scores + block * kLanes, score);
    }
    largest = max(score, largest);
  }
  const float scale = tile.task.scale * kLog2e, maximum = reduce_max(largest) * scale;
  Vec sum = zero();
  for (int block = first_block; block < end; block++) {
    Vec p = exp2_vec(fma(load(scores + block * kLanes), set1(scale), set1(-maximum)));
    if (!is_full_block(tile.range, block)) {
      p = select(owned_lanes(tile.range, block), p, zero());
    }
    sum = add(sum, p);
    Elem<T>::store_input(tile.weights + i * kWeightStride + block * kLanes, p);
  }
  tile.maximum[i] = maximum;
  tile.denominator[i] = reduce_add(sum);
}

// Blocks of values that follow one another in memory.
template <class T>
struct ValueBlocks {
  const T* at;
  int first, count;
};

// numerator[i][d..] += weights · values
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void add_value_tile(const EncodeTile<T>& tile, int first,
                                                  const ValueBlocks<T>& values, int64_t d,
                                                  NextRows& next) {
  float* numerator = tile.numerator + first * tile.columns + d;
  Vec acc[MR][NR];
  load_tile(acc, numerator, tile.columns);
  const T* columns[NR];
  for (int j = 0; j < NR; j++) columns[j] = values.at + (d + j * kLanes) * kStep<T>;
  const int64_t steps = values.count * (kLanes / kStep<T>);
  accumulate<T, MR, NR>(acc, tile.weights + first * kWeightStride + values.first * kLanes,
                        kWeightStride, steps, columns, tile.columns * kStep<T>, next.take(steps));
  store_tile(acc, numerator, tile.columns);
}

template <class T, int MR>
inline void add_value_columns(const EncodeTile<T>& tile, int first, const ValueBlocks<T>& values,
                              NextRows& next) {
  constexpr int most = tile_vecs<MR>(kAttendVecs);
  const int64_t vecs = tile.columns / kLanes, tiles = ceil_div(vecs, most);
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t low = t * vecs / tiles, high = (t + 1) * vecs / tiles;
    with_count<most>(int(high - low), [&](auto n) {
      constexpr int NR = decltype(n)::value;
      if constexpr (NR <= kHeldVecs || NR % kHeldVecs == 0) {
        return add_value_tile<T, MR, NR>(tile, first, values, low * kLanes, next);
      }
    });
  }
}

template <class T>
inline void add_values(const EncodeTile<T>& tile, const ValueBlocks<T>& values) {
  if (values.count == 0) return;
  const int64_t elements = values.count * kLanes * tile.columns;
  NextRows next(values.at + elements, elements * int64_t(sizeof(T)));
  for_each_tile(tile.count, [&](auto n, int first) {
    add_value_columns<T, decltype(n)::value>(tile, first, values, next);
  });
}

template <class T>
inline void sum_values(EncodeTile<T>& tile) {
  const int64_t size = tile.count * tile.columns;
  for (int64_t i = 0; i < size; i += kLanes) store(tile.numerator + i, zero());
  const int64_t whole = tile.task.image_rows / kLanes;  // blocks of the image's rows alone
  const int end = tile.end_block();
  int block = tile.first_block();
  while (block < end && tile.block_of_image(block) < whole) {
    const int64_t left = std::min<int64_t>(end, whole - tile.block_of_image(0)) - block;
    const int count = int(std::min<int64_t>(left, kEncodeBlocks));
    add_values<T>(tile, {value_block<T>(tile.task.kept, tile.head, tile.block_of_image(block)),
                         block, count});
    block += count;
  }
  add_values<T>(tile, {tile.last_values, block, end - block});
}

// The part of the bounds in a span.
inline TokenRange within_span(TokenRange bounds, int64_t span) {
  const int64_t start = span * kSpan, begin = bounds.begin - start, end = bounds.end - start;
  return {int32_t(std::max<int64_t>(begin, 0)), int32_t(std::min<int64_t>(end, kSpan))};
}

template <class T>
inline void attend_rows(EncodeTile<T>& tile) {
  for (int i = 0; i < tile.count; i++) {
    Partial{tile.sums + i * tile.stride, tile.columns}.denominator() = 0.0f;
  }
  const int64_t end = ceil_div(tile.bounds.end, kSpan);
  for (tile.span = tile.bounds.begin / kSpan; tile.span < end; tile.span++) {
    tile.range = within_span(tile.bounds, tile.span);
    if (tile.range.empty()) continue;
    score_rows(tile);
    for (int i = 0; i < tile.count; i++) weigh_rows(tile, i);
    sum_values(tile);
    for (int i = 0; i < tile.count; i++) {
      merge_span({tile.sums + i * tile.stride, tile.columns}, tile.numerator + i * tile.columns,
                 tile.maximum[i], tile.denominator[i]);
    }
  }
}

template <class T>
inline void load_queries(EncodeTile<T>& tile, int64_t first) {
  const EncoderHeads& kept = tile.task.kept;
  const int64_t size = kept.head_size;
  const T* from =
      static_cast<const T*>(kept.queries) + (tile.head * kept.rows + tile.task.start + first) * size;
  const int64_t all = tile.count * size;
  if constexpr (std::is_same_v<Input<T>, T>) {
    __builtin_memcpy(tile.queries, from, size_t(all) * sizeof(T));
  } else {
    for (int64_t i = 0; i < all; i += kLanes) {
      const int n = int(all - i < kLanes ? all - i : kLanes);
      store_some(tile.queries + i, load_some(from + i, n), n);
    }
  }
}

template <class T>
inline void write_rows(const EncodeTile<T>& tile, int64_t first) {
  const int64_t size = tile.task.kept.head_size, width = tile.task.kept.width();
  for (int i = 0; i < tile.count; i++) {
    const Partial sum{tile.sums + i * tile.stride, tile.columns};
    const bool saw_nothing = sum.denominator() == 0.0f;
    const Vec inverse = set1(saw_nothing ? 0.0f : 1.0f / sum.denominator());
    T* out = static_cast<T*>(tile.task.out) + (first + i) * width + tile.head * size;
    for (int64_t d = 0; d < size; d += kLanes) {
      const Vec y = saw_nothing ? zero() : mul(load(sum.values + d), inverse);
      store_some(out + d, y, int(size - d < kLanes ? size - d : kLanes));
    }
  }
}

inline TokenRange bounds_of(const EncodeTask& task, int64_t row) {
  const int32_t end = int32_t(task.image_rows);
  if (task.bounds == nullptr) return {0, end};
  return {std::max(task.bounds[2 * row], 0), std::min(task.bounds[2 * row + 1], end)};
}

// Copies the image's last rows of values, if they are no whole block.
template <class T>
inline void copy_last_values(EncodeTile<T>& tile) {
  const int64_t rows = tile.task.image_rows, left = rows % kLanes;
  if (left == 0) return;
  const T* from = value_block<T>(tile.task.kept, tile.head, rows / kLanes);
  for (int64_t lane = 0; lane < kLanes; lane++) {
    const int64_t at = lane / kStep<T> * tile.columns * kStep<T> + lane % kStep<T>;
    for (int64_t d = 0; d < tile.columns; d++) {
      tile.last_values[at + d * kStep<T>] = lane < left ? from[at + d * kStep<T>] : T{};
    }
  }
}

// A unit is a block of queries of one head; consecutive units share the head's keys.
template <class T>
void encode_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const EncodeUnits*>(context);
  const EncodeTask& task = *units.task;
  for (int64_t u = begin; u < end; u++) {
    worker.arena.reset();
    EncodeTile<T> tile(task, u / units.blocks(), worker.arena);
    copy_last_values(tile);
    const int64_t low = u % units.blocks() * units.queries;
    const int64_t high = std::min(low + units.queries, task.rows);
    for (int64_t row = low; row < high; row += tile.count) {
      tile.bounds = bounds_of(task, row);
      tile.count = 1;
      while (row + tile.count < high) {
        const TokenRange next = bounds_of(task, row + tile.count);
        if (next.begin != tile.bounds.begin || next.end != tile.bounds.end) break;
        tile.count++;
      }
      load_queries(tile, row);
      attend_rows(tile);
      write_rows(tile, row);
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
