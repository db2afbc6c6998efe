// Attention over bf16 KV by tiles (vec/tile.h), for as many queries as a tile has rows.
//
// A key sub-block, [D/2][16][2], is a tile B for each 32 elements of D, and one of half a tile's depth
// where 16 are left. A value sub-block, [8][D][2], is a tile B of half the depth for each 16 columns.
// So a score is reduced over blocks of 32 elements of D, and a numerator over sub-blocks of 16
// tokens, in ascending order, each as vec/tile.h says; a decode step computes the same with fewer
// rows. Values of a sub-block that is partly outside a query's range are loaded as zero, and added by
// vectors in the same order.
#pragma once

#include "kernels/attention_float.h"
#include "vec/tile.h"

namespace cadenza::CADENZA_ISA {

// KV as kernels/attention_float.h has it, multiplied by tiles.
struct TileKv : FloatKv<bf16> {};

template <>
inline constexpr int kTileQueries<TileKv> = kTileRows;

// Tiles of sums, of a step of D and of half a step. Queries or weights are A, keys or values B.
constexpr int kSumTiles = 4;
constexpr int kA = 4, kB = 5, kHalfA = 6, kHalfB = 7;
constexpr int kHalfDepth = kTileDepth / 2, kHalfBytes = kTileRowBytes / 2;
// The second element of a word of two.
constexpr uint32_t kHighHalf = 0xffff0000u;
// Bytes of a key sub-block for one step of D.
constexpr int64_t kKeyStepBytes = kTileRows * kTileRowBytes;
static_assert(kLanes == kHalfDepth && kLanes == kTileRows, "a sub-block is a tile, or half of one");

inline TileConfig attention_config(int queries) {
  TileConfig config;
  for (int i = 0; i < kSumTiles; i++) config.set(i, queries, kTileRowBytes);
  config.set(kA, queries, kTileRowBytes);
  config.set(kB, kTileRows, kTileRowBytes);
  config.set(kHalfA, queries, kHalfBytes);
  config.set(kHalfB, kTileRows / 2, kTileRowBytes);
  return config;
}

template <>
struct AttendOperands<TileKv> {
  AttendOperands(Arena& arena, int64_t head_size)
      : queries(arena.take<bf16>(kTileRows * round_up(head_size, kTileDepth))),
        weights(arena.take<bf16>(kTileRows * kSpan)) {}

  bf16* const queries;  // [D/32][count][32]
  bf16* const weights;  // [sub-blocks of the span][count][16]
};

// The number of a tile's queries, which unrolls nothing.
struct RowCount {
  int value;
};
template <>
struct QueryCount<TileKv> {
  template <class Body>
  static void with(int count, Body&& body) {
    body(RowCount{count});
  }
};

inline void prepare_query(AttendTile<TileKv>& tile, int i) {
  prepare_head<bf16>(tile.task, tile.token(i), tile.head(i), [&](int64_t d, Vec values) {
    const int64_t row = d / kTileDepth * tile.count + i;
    store_bf16(tile.operands.queries + row * kTileDepth + d % kTileDepth, values);
  });
}

inline bf16* weights_of(const AttendTile<TileKv>& tile, int i, int block) {
  return tile.operands.weights + (block * tile.count + i) * kLanes;
}
inline void store_weights(AttendTile<TileKv>& tile, int i, int block, Vec p) {
  store_bf16(weights_of(tile, i, block), p);
}

// Calls body(Count<i>) for 0 <= i < N.
template <int N, class Body>
[[gnu::always_inline]] inline void for_each_tile(Body&& body) {
  if constexpr (N > 1) for_each_tile<N - 1>(body);
  body(Count<N - 1>{});
}

// Prefetches `bytes` of a sub-block.
inline void prefetch_bytes(const bf16* block, int64_t begin, int64_t bytes) {
  const char* at = reinterpret_cast<const char*>(block) + begin;
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(at + i, 0, 3);
}

// A prompt's queries read sub-blocks again and again, a decode step's once.
inline bool reads_once(const AttendTile<TileKv>& tile) {
  return tile.unit.query_end - tile.unit.query_begin == 1;
}

template <int N>
inline void score_blocks(AttendTile<TileKv>& tile, int block) {
  const bf16* const* keys = tile.keys(block);
  const int64_t size = tile.task.head_size, steps = size / kTileDepth;
  const bool prefetches = reads_once(tile);
  const bf16* queries = tile.operands.queries;
  for_each_tile<N>([](auto j) { tile_zero<decltype(j)::value>(); });
  for (int64_t s = 0; s < steps; s++, queries += tile.count * kTileDepth) {
    tile_load<kA>(queries, kTileRowBytes);
    for_each_tile<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      if (prefetches) prefetch_bytes(keys[J + kAttendVecs], s * kKeyStepBytes, kKeyStepBytes);
      tile_load<kB>(keys[J] + s * kTileRows * kTileDepth, kTileRowBytes);
      tile_dot_bf16<J, kA, kB>();
    });
  }
  if (size % kTileDepth != 0) {
    tile_load<kHalfA>(queries, kTileRowBytes);
    for_each_tile<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      tile_load<kHalfB>(keys[J] + steps * kTileRows * kTileDepth, kTileRowBytes);
      tile_dot_bf16<J, kHalfA, kHalfB>();
    });
  }
  for_each_tile<N>([&](auto j) {
    constexpr int J = decltype(j)::value;
    tile_store<J>(tile.scores + (block + J) * kLanes, kSpan * sizeof(float));
  });
}

inline void score_span(RowCount, AttendTile<TileKv>& tile, TokenRange all) {
  tile_configure(attention_config(tile.count));
  int block = all.begin / kLanes, end = (all.end + kLanes - 1) / kLanes;
  for (; block + kSumTiles <= end; block += kSumTiles) score_blocks<kSumTiles>(tile, block);
  for (; block < end; block++) score_blocks<1>(tile, block);
}

// Sub-blocks [begin, end) of a span.
struct BlockRange {
  int begin, end;
};

// Adds weights times values of whole sub-blocks to N tiles of the numerators, from column d on.
template <int N>
inline void add_values(AttendTile<TileKv>& tile, BlockRange blocks, int64_t d) {
  const int64_t size = tile.task.value_size, stride = size * int64_t(sizeof(float));
  const bool prefetches = reads_once(tile);
  float* numerator = tile.numerator + d;
  for_each_tile<N>([&](auto j) {
    constexpr int J = decltype(j)::value;
    tile_load<J>(numerator + J * kLanes, stride);
  });
  for (int block = blocks.begin; block < blocks.end; block++) {
    const bf16* values = tile.values(block)[0] + d * 2;
    if (prefetches) {
      const int64_t bytes = N * kTileRows / 2 * kTileRowBytes;
      prefetch_bytes(tile.values(block)[kAttendVecs], d / (N * kLanes) * bytes, bytes);
    }
    tile_load<kHalfA>(weights_of(tile, 0, block), kHalfBytes);
    for_each_tile<N>([&](auto j) {
      constexpr int J = decltype(j)::value;
      tile_load<kHalfB>(values + J * kLanes * 2, stride);
      tile_dot_bf16<J, kHalfA, kHalfB>();
    });
  }
  for_each_tile<N>([&](auto j) {
    constexpr int J = decltype(j)::value;
    tile_store<J>(numerator + J * kLanes, stride);
  });
}

// Queries of a tile from `first` on that see the same tokens, at most kMostAlike.
constexpr int kMostAlike = 4;
inline int count_alike(const AttendTile<TileKv>& tile, int first) {
  const TokenRange range = tile.range[first];
  int count = 1;
  while (count < kMostAlike && first + count < tile.count &&
         tile.range[first + count].begin == range.begin &&
         tile.range[first + count].end == range.end) {
    count++;
  }
  return count;
}

// The same of R queries that see the same tokens, in the same order; values outside their range are
// loaded as zero.
template <int R>
inline void add_masked_values(AttendTile<TileKv>& tile, int first, BlockRange blocks) {
  const int64_t size = tile.task.value_size;
  for (int block = blocks.begin; block < blocks.end; block++) {
    const uint32_t kept = bits(owned_lanes(tile.range[first], block));
    alignas(64) float weights[R][kLanes];
    for (int i = 0; i < R; i++) store(weights[i], load_bf16(weights_of(tile, first + i, block)));
    for (int64_t d = 0; d < size; d += kLanes) {
      const bf16* values = tile.values(block)[0] + d * 2;
      Vec even[R][1], odd[R][1];
      clear(even);
      clear(odd);
      for (int token = 0; token < kLanes; token += 2) {
        const VecI words = Bf16Memory::words_masked(values + token * size, kept >> token & 1,
                                                    kept >> (token + 1) & 1);
        const Vec low = as_float(shl<16>(words)), high = as_float(and_i(words, set1_i(kHighHalf)));
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) {
          even[i][0] = fma(low, set1(weights[i][token]), even[i][0]);
          odd[i][0] = fma(high, set1(weights[i][token + 1]), odd[i][0]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) {
        float* sum = tile.numerator + (first + i) * size + d;
        store(sum, add(load(sum), add(even[i][0], odd[i][0])));
      }
    }
  }
}

// Calls body(i, count) for the runs of a tile's queries that see the same tokens.
template <class Body>
inline void for_each_run(const AttendTile<TileKv>& tile, Body&& body) {
  for (int i = 0; i < tile.count;) {
    const int count = count_alike(tile, i);
    with_count<kMostAlike>(count, [&](auto n) { body(i, n); });
    i += count;
  }
}

// The sub-blocks that a range touches, and those of them that it covers.
inline BlockRange touched_blocks(TokenRange range) {
  return {range.begin / kLanes, (range.end + kLanes - 1) / kLanes};
}
inline BlockRange whole_blocks(TokenRange range) {
  return {(range.begin + kLanes - 1) / kLanes, range.end / kLanes};
}

// Each query adds its sub-blocks in ascending order: those before the ones that are whole for every
// query of the tile, these, then the rest. If any query has an empty range, there are none for all.
inline void add_span_values(RowCount, AttendTile<TileKv>& tile) {
  BlockRange shared{0, kBlocksPerSpan};
  bool none = false;
  for (int i = 0; i < tile.count; i++) {
    const BlockRange whole = whole_blocks(tile.range[i]);
    none |= tile.range[i].empty();
    shared = {std::max(shared.begin, whole.begin), std::min(shared.end, whole.end)};
  }
  none |= shared.end <= shared.begin;
  const int64_t size = tile.task.value_size;
  for (int64_t at = 0; at < tile.count * size; at += kLanes) store(tile.numerator + at, zero());
  for_each_run(tile, [&](int i, auto n) {
    if (tile.range[i].empty()) return;
    const BlockRange mine = touched_blocks(tile.range[i]);
    add_masked_values<decltype(n)::value>(tile, i, {mine.begin, none ? mine.end : shared.begin});
  });
  if (none) return;
  int64_t d = 0;
  for (; d + kSumTiles * kLanes <= size; d += kSumTiles * kLanes) {
    add_values<kSumTiles>(tile, shared, d);
  }
  for (; d < size; d += kLanes) add_values<1>(tile, shared, d);
  for_each_run(tile, [&](int i, auto n) {
    const int end = touched_blocks(tile.range[i]).end;
    add_masked_values<decltype(n)::value>(tile, i, {shared.end, end});
  });
}

}  // namespace cadenza::CADENZA_ISA
