// Attention over KV in int8: the arithmetic of core/kv_codes.h.
//
// A code is never NaN, so a token outside a query's range counts nothing if its weight code is 0:
// what unwritten slots hold can enter only by their scales, which are masked.
#pragma once

#include "kernels/attention.h"
#include "kernels/query_codes.h"

namespace cadenza::CADENZA_ISA {

// Keys and values as codes of activations of type T.
template <class T>
struct CodeKv {
  using Activation = T;
  using Stored = uint8_t;
  static constexpr bool kHasValues = true;
  static int64_t token_bytes(int64_t head_size) { return kv_code_bytes(head_size); }
};

// Quantises the elements of a key or value; returns the scale.
template <class T>
inline float quantise_head(const T* x, int64_t size, int8_t* codes) {
  const Largest largest = Largest::of(x, size);
  if (!largest.has_codes()) {
    __builtin_memset(codes, 0, size_t(size));
    return largest.scale_without_codes();
  }
  const Vec inverse = set1(kMostCode / largest.value());
  for (int64_t d = 0; d < size; d += kLanes) {
    store_codes(codes + d, round_even(mul(Elem<T>::load(x + d), inverse)));
  }
  return largest.value() / kMostCode;
}

template <class T>
inline float* scales_of_block(const AttendTask& task, T* block) {
  return const_cast<float*>(reinterpret_cast<const float*>(block + kLanes * task.head_size));
}

template <class T>
inline void write_key(CodeKv<T>, const AttendTask& task, const T* key, char* block, int64_t lane) {
  alignas(64) int8_t codes[kMaxHeadSize];
  scales_of_block(task, block)[lane] = quantise_head(key, task.head_size, codes);
  uint32_t* to = reinterpret_cast<uint32_t*>(block) + lane;
  for (int64_t i = 0; i < task.head_size; i += 4) {
    to[i / 4 * kLanes] = four_codes(codes + i) ^ 0x80808080u;
  }
}

// Writes single bytes: another thread may write the other tokens of the same four.
template <class T>
inline void append_value(CodeKv<T>, const AttendTask& task, NewTokens, int64_t token,
                         const T* value, char* block) {
  alignas(64) int8_t codes[kMaxHeadSize];
  const int64_t lane = task.slot_mapping[token] % kLanes;
  scales_of_block(task, block)[lane] = quantise_head(value, task.head_size, codes);
  char* to = block + lane / 4 * 4 * task.head_size + lane % 4;
  for (int64_t i = 0; i < task.head_size; i++) to[4 * i] = char(codes[i]);
}

template <class T>
struct AttendOperands<CodeKv<T>> {
  AttendOperands(Arena& arena, int64_t head_size)
      : queries(arena, kAttendRows, head_size),
        weights(arena.take<int8_t>(kAttendRows * kSpan)),
        largest(arena.take<float>(kAttendRows * kBlocksPerSpan)),
        scales(arena.take<float>(kAttendRows * kBlocksPerSpan)) {}

  QueryCodes queries;
  int8_t* const weights;  // less kWeightBias
  float* const largest;  // [count, 32]: the largest weight of each sub-block before it is quantised
  float* const scales;   // [count, 32]: of each sub-block's weights
};

template <class T>
inline void prepare_query(AttendTile<CodeKv<T>>& tile, int i) {
  alignas(64) float query[kMaxHeadSize];
  prepare_head<T>(tile.task, tile.token(i), tile.head(i),
                  [&](int64_t d, Vec values) { store(query + d, values); });
  tile.operands.queries.set(i, query);
}

// Column vectors of a tile of MR rows.
template <int MR>
constexpr int kCodeVecs = MR * kAttendVecs <= kDotRows * kDotVecs ? kAttendVecs : kDotVecs;

// Calls body(Count<n>, row) for tiles of at most kDotRows of a tile's MR rows.
template <int MR, class Body>
[[gnu::always_inline]] inline void for_each_dot_rows(Body&& body) {
  constexpr int kTiles = (MR + kDotRows - 1) / kDotRows, kRows = (MR + kTiles - 1) / kTiles;
  int row = 0;
  for (; row + kRows <= MR; row += kRows) body(Count<kRows>{}, row);
  if constexpr (MR % kRows != 0) body(Count<MR % kRows>{}, row);
}

// Scores of queries [row, row + MR) and NR sub-blocks from `block` on.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void score_blocks(AttendTile<CodeKv<T>>& tile, int row, int block) {
  const AttendTask& task = tile.task;
  const QueryCodes& queries = tile.operands.queries;
  const uint8_t* const* keys = tile.keys(block);
  VecI dots[MR][NR];
  queries.dot(dots, row, keys, keys + kAttendVecs);
#pragma GCC unroll 4
  for (int j = 0; j < NR; j++) {
    const Vec scales = load(scales_of_block(task, keys[j]));
    __builtin_prefetch(scales_of_block(task, tile.values(block)[j]), 0, 3);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      Vec score = mul(mul(from_i32(dots[i][j]), set1(queries.scale(row + i))), scales);
      store(tile.scores + (row + i) * kSpan + (block + j) * kLanes, score);
    }
  }
}

template <class T, int MR>
inline void score_span(Count<MR>, AttendTile<CodeKv<T>>& tile, TokenRange all) {
  for_each_dot_rows<MR>([&](auto rows, int row) {
    constexpr int kRows = decltype(rows)::value, NR = kCodeVecs<kRows>;
    int block = all.begin / kLanes, end = (all.end + kLanes - 1) / kLanes;
    for (; block + NR <= end; block += NR) score_blocks<T, kRows, NR>(tile, row, block);
    for (; block < end; block++) score_blocks<T, kRows, 1>(tile, row, block);
  });
}

// Stores a sub-block's weights in place of its scores.
template <class T>
inline void store_weights(AttendTile<CodeKv<T>>& tile, int i, int block, Vec p) {
  Vec weights = mul(p, load(scales_of_block(tile.task, tile.values(block)[0])));
  if (!is_full_block(tile.range[i], block)) {
    weights = select(owned_lanes(tile.range[i], block), weights, zero());
  }
  store(tile.scores + i * kSpan + block * kLanes, weights);
  const uint32_t largest = reduce_max_u(as_int(weights));  // weights are not negative
  __builtin_memcpy(tile.operands.largest + i * kBlocksPerSpan + block, &largest, sizeof(largest));
}

// Scales, and what the weights are multiplied by, of sixteen sub-blocks. A sub-block outside the
// query's range has the scale -0, which adds exactly nothing to a numerator.
inline void scale_weights(const float* largest, Mask is_mine, float* scales, float* inverses) {
  float smallest;
  __builtin_memcpy(&smallest, &kSmallestLargest, sizeof(smallest));
  const Vec most = load(largest), code = set1(kMostWeightCode);
  const Vec infinity = set1(__builtin_inff()), nan = set1(__builtin_nanf(""));
  const Mask is_used = mask_and(cmp_ge(most, set1(smallest)), cmp_gt(infinity, most));
  const Vec unused = select(cmp_gt(set1(smallest), most), zero(), nan);
  store(scales, select(is_mine, select(is_used, div(most, code), unused), set1(-0.0f)));
  store(inverses, select(is_used, div(code, most), zero()));
}

// Quantises the weights of one query in the span.
template <class T>
inline void quantise_weights(AttendTile<CodeKv<T>>& tile, int i) {
  const TokenRange range = tile.range[i];
  TokenRange mine{range.begin / kLanes, (range.end + kLanes - 1) / kLanes};
  if (range.empty()) mine = {0, 0};
  const float* weights = tile.scores + i * kSpan;
  int8_t* codes = tile.operands.weights + i * kSpan;
  const int64_t at = i * kBlocksPerSpan;
  const int end = tile.first_block + tile.num_blocks;
  alignas(64) float inverses[kBlocksPerSpan];
  for (int first = tile.first_block / kLanes * kLanes; first < end; first += kLanes) {
    scale_weights(tile.operands.largest + at + first, owned_lanes(mine, first / kLanes),
                  tile.operands.scales + at + first, inverses + first);
  }
  for (int block = tile.first_block; block < end; block++) {
    if (block < mine.begin || block >= mine.end) {
      __builtin_memset(codes + block * kLanes, -kWeightBias, kLanes);
      continue;
    }
    Vec scaled = mul(load(weights + block * kLanes), set1(inverses[block]));
    store_weights(codes + block * kLanes, round_even(max(scaled, zero())));  // NaN becomes 0
  }
}

// What the bias of the weights' codes takes from the dots with NR vectors of a sub-block's values.
template <int NR>
[[gnu::always_inline]] inline void start_dots(VecI (&dots)[NR], const uint8_t* values,
                                              int64_t size) {
  constexpr int8_t kOnes[4] = {1, 1, 1, 1};
#pragma GCC unroll 4
  for (int j = 0; j < NR; j++) {
    dots[j] = set1_i(0);
    if constexpr (kWeightBias == 0) continue;
#pragma GCC unroll 4
    for (int step = 0; step < kLanes / 4; step++) {
      const uint8_t* column = values + step * 4 * size + j * 64;
      const SignedCodeVec codes = load_signed_codes(reinterpret_cast<const int8_t*>(column));
      dots[j] = dot_signed_codes(dots[j], codes, broadcast_codes(kOnes));
    }
    dots[j] = mul_i(dots[j], set1_i(kWeightBias));
  }
}

// The numerators of queries [row, row + MR), NR vectors from element d on.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void sum_values(AttendTile<CodeKv<T>>& tile, int row, int64_t d) {
  const int64_t size = tile.task.head_size;
  const int8_t* weights = tile.operands.weights + row * kSpan;
  const float* scales = tile.operands.scales + row * kBlocksPerSpan;
  Vec acc[MR][NR];
  clear(acc);
  for (int block = tile.first_block; block < tile.first_block + tile.num_blocks; block++) {
    const uint8_t* values = tile.values(block)[0] + 4 * d;
    const uint8_t* next = tile.values(block)[kAttendVecs] + 4 * d;
    VecI dots[MR][NR];
    start_dots(dots[0], values, size);
#pragma GCC unroll 8
    for (int i = 1; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) dots[i][j] = dots[0][j];
#pragma GCC unroll 4
    for (int step = 0; step < kLanes / 4; step++) {
      SignedCodeVec columns[NR];
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) {
        const uint8_t* column = values + step * 4 * size + j * 64;
        columns[j] = load_signed_codes(reinterpret_cast<const int8_t*>(column));
        prefetch_kv(next + step * 4 * size + j * 64);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        CodeOperand codes = broadcast_codes(weights + i * kSpan + block * kLanes + 4 * step);
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) dots[i][j] = dot_signed_codes(dots[i][j], columns[j], codes);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const Vec scale = set1(scales[i * kBlocksPerSpan + block]);
#pragma GCC unroll 4
      for (int j = 0; j < NR; j++) acc[i][j] = fma(from_i32(dots[i][j]), scale, acc[i][j]);
    }
  }
  store_tile(acc, tile.numerator + row * size + d, size);
}

template <class T, int MR>
inline void add_span_values(Count<MR>, AttendTile<CodeKv<T>>& tile) {
  const int64_t size = tile.task.head_size;
  for (int i = 0; i < MR; i++) quantise_weights(tile, i);
  for_each_dot_rows<MR>([&](auto rows, int row) {
    constexpr int kRows = decltype(rows)::value, NR = kCodeVecs<kRows>;
    int64_t d = 0;
    for (; d + NR * kLanes <= size; d += NR * kLanes) sum_values<T, kRows, NR>(tile, row, d);
    for (; d < size; d += kLanes) sum_values<T, kRows, 1>(tile, row, d);
  });
}

}  // namespace cadenza::CADENZA_ISA
