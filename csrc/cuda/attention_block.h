// The blocks that attend: a tile of queries over the tokens of one part, or of all parts in order.
//
// A block has Groups x Split warps. A group has sixteen queries; its warps share the sub-blocks of
// scores among them, and the columns of values.
#pragma once

#include <algorithm>

#include "cuda/attention_kv.h"

namespace cadenza::cuda {

// A tile of queries, all of one row and KV head, and the parts that a block computes.
struct Tile {
  RowContext context;
  int row, kv_head;
  int first, count;  // queries of the row, one for each token and head of the group
  int part, end_part;
  int begin, end;  // the tokens that they see
};

template <class Kv, int Groups, int Split>
struct BlockShape {
  static constexpr int kRows = Groups * kTileRows, kThreads = Groups * Split * kWarp;
  static constexpr int kSubs = Kv::kTokens / kSub;
  static constexpr int kOwnSubs = (kSubs + Split - 1) / Split;
  static constexpr int kTiles = Kv::kValue / 8 / Split;  // of eight columns, of each warp
  static_assert(kTiles % 2 == 0 && kTiles * 8 * Split == Kv::kValue);

  struct alignas(16) Shared {
    unsigned char queries[kRows * Kv::kQueryBytes];
    typename Kv::Stage stages[Kv::kStages];
    unsigned char weights[kRows * Kv::kWeightPitch];
    float maxima[kRows][kSubs], sums[kRows][kSubs], weight_scales[kRows][kSubs];
    float query_scales[kRows];
    int is_last;
  };
};

// What a warp knows of its rows g and g + 8.
template <int Tiles>
struct RowState {
  float numerator[Tiles][4];
  float maximum[2], sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) numerator[n][i] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) maximum[half] = -INFINITY, sum[half] = 0.0f;
  }
};

template <class Kv, int Groups, int Split>
class AttendBlock {
  using Shape = BlockShape<Kv, Groups, Split>;
  static constexpr int kSubs = Shape::kSubs, kOwn = Shape::kOwnSubs, kTiles = Shape::kTiles;

 public:
  using State = RowState<kTiles>;

  __device__ __forceinline__ AttendBlock(const Attention& a, typename Shape::Shared& shared)
      : a_(a), shared_(shared) {
    lane_ = int(threadIdx.x) % kWarp;
    const int warp = int(threadIdx.x) / kWarp;
    group_ = warp / Split, split_ = warp % Split;
  }

  // Loads the tile's queries and finds what the warp's rows see.
  __device__ __forceinline__ void start(const Tile& tile) {
    tile_ = tile;
    token_ = tile.context.first, shift_ = tile.context.shift;
    for (int i = int(threadIdx.x) / kWarp; i < Shape::kRows; i += Groups * Split) {
      const bool holds = i < tile.count;
      Kv::load_query(a_, holds ? head_at(i) : 0, holds, shared_.queries + i * Kv::kQueryBytes, lane_);
      if (Kv::kHasCodes && lane_ == 0) shared_.query_scales[i] = holds ? a_.query_scales[head_at(i)] : 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = row_at(half);
      low_[half] = high_[half] = 0;
      if (i >= tile.count) continue;
      const int token = token_of(i);
      low_[half] = a_.begin_of_context(token);
      high_[half] = min(a_.end_of_context(token), a_.kv_lens[tile.row]);
    }
  }

  // The blocks that hold the tile's tokens of its parts.
  __device__ __forceinline__ int first_block() const {
    return max((tile_.begin + shift_) / Kv::kTokens, tile_.part * (kPart / Kv::kTokens));
  }
  __device__ __forceinline__ int end_block() const {
    const int end = (tile_.end + shift_ + Kv::kTokens - 1) / Kv::kTokens;
    return min(end, tile_.end_part * (kPart / Kv::kTokens));
  }

  // Starts to copy a block's keys and values, with the queries at first.
  __device__ __forceinline__ void load(int block) {
    auto& stage = stage_of(block);
    SubPlace places[kSubs];
    find_places(start_of(block), places);
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) Kv::template load<Shape::kThreads>(a_, stage, sub, places[sub]);
    copy_commit();
  }

  __device__ __forceinline__ auto& stage_of(int block) { return shared_.stages[block % Kv::kStages]; }

  // Adds a block's tokens, which are in shared memory, to the part's state. Called by all threads.
  __device__ __forceinline__ void add(int block, State& state) {
    const auto& stage = stage_of(block);
    float s[kOwn][2][4] = {};
    Kv::template score<kOwn, Split>(s, shared_.queries + group_ * kTileRows * Kv::kQueryBytes, stage, split_);
    mask(s, stage, start_of(block));
    group_barrier();
    float keep[2];
    raise_maximum(state, keep);
    weigh(s, stage, state);
    group_barrier();
    take_sums(state, keep);
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.numerator[n][i] *= keep[i / 2];
    }
    const int row = group_ * kTileRows;
    Kv::template add_values<kTiles>(state.numerator, weights(), shared_.weight_scales[row], stage, split_ * kTiles * 8);
  }

  // Writes the state of the tile's part for the block that merges.
  __device__ __forceinline__ void write_partial(const State& state) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = row_at(half);
      if (i >= tile_.count) continue;
      float* to = a_.partials + partial_at(i, tile_.part - tile_.context.first_part);
      if (split_ == 0 && lane_ % 4 == 0) {
        to[a_.value_size] = state.maximum[half];
        to[a_.value_size + 1] = state.sum[half];
      }
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const int column = column_of(n);
        if (column >= a_.value_size) continue;
        *reinterpret_cast<float2*>(to + column) =
            make_float2(state.numerator[n][half * 2], state.numerator[n][half * 2 + 1]);
      }
    }
  }

  // Whether this is the last of the tile's parts: then it sees what the other blocks wrote.
  __device__ __forceinline__ bool is_last(int* flag) const {
    memory_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int first_query = tile_.row * a_.few_tiles + tile_.first / kTileRows;
      int* done = a_.plan.parts + int64_t(first_query) * a_.kv_heads + tile_.kv_head;
      *flag = atomicAdd(done, 1) == tile_.context.num_parts - 1;
      memory_fence();
    }
    __syncthreads();
    return *flag != 0;
  }

  // Merges the parts of the tile's queries, a warp for each, and writes the results.
  __device__ __forceinline__ void merge_parts() const {
    const int stride = int(partial_at(0, 1) - partial_at(0, 0));
    for (int i = int(threadIdx.x) / kWarp; i < tile_.count; i += Groups * Split) {
      const float* from = a_.partials + partial_at(i, 0);
      for (int column = lane_ * 4; column < a_.value_size; column += 4 * kWarp) merge_columns(i, from, stride, column);
    }
  }

  static __device__ __forceinline__ void merge(State& total, const State& part) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Merge merge(total.maximum[half], total.sum[half], part.maximum[half], part.sum[half]);
      total.maximum[half] = merge.maximum;
      total.sum[half] = merge.of(total.sum[half], part.sum[half]);
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; i++)
          total.numerator[n][i] = merge.of(total.numerator[n][i], part.numerator[n][i]);
      }
    }
  }

  __device__ __forceinline__ void write(const State& total) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = row_at(half);
      if (i >= tile_.count) continue;
      const int64_t head = head_at(i);
      const float inverse = inverse_total(a_, total.maximum[half], total.sum[half], int(head % a_.heads));
      const bool saw_nothing = total.sum[half] == 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const int column = column_of(n);
        if (column >= a_.value_size) continue;
        const float x = saw_nothing ? 0.0f : total.numerator[n][half * 2] * inverse;
        const float y = saw_nothing ? 0.0f : total.numerator[n][half * 2 + 1] * inverse;
        write_output(a_, head * a_.value_size + column, x, y);
      }
    }
  }

 private:
  // The index of the partial result of a query of the tile.
  __device__ __forceinline__ int64_t partial_at(int i, int part) const {
    const int query = tile_.first + i, group = a_.group();
    const int64_t slot = tile_.context.slots + int64_t(part) * tile_.context.queries + query / group;
    return (slot * a_.heads + tile_.kv_head * group + query % group) * a_.partial_stride();
  }

  // Four columns of a query's merged parts, which are `stride` apart.
  __device__ __forceinline__ void merge_columns(int i, const float* from, int stride, int column) const {
    float maximum = -INFINITY, sum = 0.0f, total[4] = {};
#pragma unroll 8
    for (int part = 0; part < tile_.context.num_parts; part++) {
      const float* own = from + int64_t(part) * stride;
      const float4 values = load_fresh(reinterpret_cast<const float4*>(own + column));
      const float2 end = load_fresh(reinterpret_cast<const float2*>(own + a_.value_size));
      const Merge merge(maximum, sum, end.x, end.y);
      maximum = merge.maximum;
      sum = merge.of(sum, end.y);
      total[0] = merge.of(total[0], values.x), total[1] = merge.of(total[1], values.y);
      total[2] = merge.of(total[2], values.z), total[3] = merge.of(total[3], values.w);
    }
    const int64_t head = head_at(i), at = head * a_.value_size + column;
    const float inverse = inverse_total(a_, maximum, sum, int(head % a_.heads));
    for (int pair = 0; pair < 4; pair += 2) {
      write_output(a_, at + pair, sum == 0.0f ? 0.0f : total[pair] * inverse,
                   sum == 0.0f ? 0.0f : total[pair + 1] * inverse);
    }
  }

  __device__ __forceinline__ int row_at(int half) const { return group_ * kTileRows + lane_ / 4 + half * 8; }
  __device__ __forceinline__ int column_of(int n) const { return (split_ * kTiles + n) * 8 + lane_ % 4 * 2; }
  __device__ __forceinline__ int token_of(int i) const { return token_ + (tile_.first + i) / a_.group(); }
  // The index of a query's head among all heads of all tokens.
  __device__ __forceinline__ int64_t head_at(int i) const {
    return int64_t(token_of(i)) * a_.heads + tile_.kv_head * a_.group() + (tile_.first + i) % a_.group();
  }
  __device__ __forceinline__ int start_of(int block) const { return block * Kv::kTokens - shift_; }
  __device__ __forceinline__ unsigned char* weights() const {
    return shared_.weights + group_ * kTileRows * Kv::kWeightPitch;
  }

  __device__ __forceinline__ void group_barrier() const {
    if constexpr (Split == 1) {
      warp_barrier();
    } else {
      __syncthreads();
    }
  }

  // Where the sub-blocks from position `start` on are. Their pages are read at once, without branches.
  __device__ __forceinline__ void find_places(int start, SubPlace (&places)[kSubs]) const {
    int index = max(start, 0) / a_.page_size, offset = max(start, 0) % a_.page_size;
    int pages[kSubs], offsets[kSubs];
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) {
      const int position = start + sub * kSub;
      const int begin = max(tile_.begin - position, 0), end = min(tile_.end - position, kSub);
      const bool exists = end > begin, reads_all = a_.has(Fault::kMultipliedPadding);
      places[sub].begin = reads_all ? 0 : begin;
      places[sub].end = exists ? (reads_all ? kSub : end) : 0;
      const int64_t row = kHasFaults && exists ? faulty_owner(position) : tile_.row;
      pages[sub] = load_constant(a_.page_table + row * a_.pages_per_row + (exists ? index : 0));
      offsets[sub] = offset;
      if (position >= 0) offset += kSub;
      const bool goes_on = offset >= a_.page_size;
      offset = goes_on ? 0 : offset, index += goes_on;
    }
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) {
      const int64_t head = (int64_t(pages[sub]) * a_.num_layers + a_.layer) * a_.kv_heads + tile_.kv_head;
      places[sub].token = places[sub].end > 0 ? head * a_.page_size + offsets[sub] : 0;
    }
  }

  // Another row of the step that holds the position.
  __device__ int faulty_owner(int position) const {
    const bool near = a_.has(Fault::kNeighbourPage) && position >= kSub && position < 2 * kSub;
    const bool far = a_.has(Fault::kNeighbourPagesFar) && position >= 640;
    for (int other = 0; (near || far) && other < a_.rows; other++) {
      const bool takes_part = a_.query_starts[other + 1] > a_.query_starts[other];
      if (other != tile_.row && takes_part && a_.kv_lens[other] >= position + kSub) return other;
    }
    return tile_.row;
  }

  // Scores scaled for exp2, and -inf outside the query's range; their maxima by sub-blocks.
  __device__ __forceinline__ void mask(float (&s)[kOwn][2][4], const typename Kv::Stage& stage, int start) {
    scale(s, stage);
    const int row = group_ * kTileRows + lane_ / 4;
#pragma unroll
    for (int u = 0; u < kOwn; u++) {
      const int sub = split_ + u * Split;
      if (sub >= kSubs) continue;
      float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int half = i % 4 / 2, lane = sub * kSub + column_of_score(i);
        float& score = s[u][i / 4][i % 4];
        const float whole = score;
        const bool sees = start + lane >= low_[half] && start + lane < high_[half];
        score = sees ? whole : -INFINITY;
        most[half] = fmaxf(most[half], score);
        if (!sees && a_.has(Fault::kMultipliedPadding)) score = whole * 0.0f + score;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        most[half] = fmaxf(most[half], warp_shuffle_xor(most[half], 1));
        most[half] = fmaxf(most[half], warp_shuffle_xor(most[half], 2));
        if (lane_ % 4 == 0) shared_.maxima[row + half * 8][sub] = most[half];
      }
    }
  }

  // The cap has a loop of its own: a branch for each score would keep the others from overlapping.
  __device__ __forceinline__ void scale(float (&s)[kOwn][2][4], const typename Kv::Stage& stage) {
    const int row = group_ * kTileRows + lane_ / 4;
    float query_scale[2] = {1.0f, 1.0f};
    if constexpr (Kv::kHasCodes) {
      query_scale[0] = shared_.query_scales[row], query_scale[1] = shared_.query_scales[row + 8];
    }
#pragma unroll
    for (int u = 0; u < kOwn; u++) {
      const int sub = min(split_ + u * Split, kSubs - 1);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float& score = s[u][i / 4][i % 4];
        const float key_scale = Kv::key_scale(stage, sub * kSub + column_of_score(i));
        score = Kv::scaled(score, query_scale[i % 4 / 2], key_scale) * a_.scale;
      }
    }
    if (a_.soft_cap == 0.0f) return;
#pragma unroll
    for (int u = 0; u < kOwn; u++) {
#pragma unroll
      for (int i = 0; i < 8; i++) s[u][i / 4][i % 4] = tanh_of(s[u][i / 4][i % 4]) * a_.soft_cap;
    }
  }

  // Of the warp's score i of a sub-block.
  __device__ __forceinline__ int column_of_score(int i) const { return i / 4 * 8 + lane_ % 4 * 2 + i % 2; }

  // The new maxima, and what is kept of what was summed up with the old ones.
  __device__ __forceinline__ void raise_maximum(State& state, float (&keep)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float highest = state.maximum[half];
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) highest = fmaxf(highest, shared_.maxima[row_at(half)][sub]);
      keep[half] = exp2_of(state.maximum[half] - finite(highest));
      state.maximum[half] = highest;
    }
  }
  // A maximum to subtract: 0 where nothing was seen.
  static __device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

  // Stores the weights of the warp's sub-blocks, and their sums.
  __device__ __forceinline__ void weigh(float (&s)[kOwn][2][4], const typename Kv::Stage& stage, const State& state) {
#pragma unroll
    for (int u = 0; u < kOwn; u++) {
      const int sub = split_ + u * Split;
      if (sub >= kSubs) continue;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float& p = s[u][i / 4][i % 4];
        const float weight = exp2_of(p - finite(state.maximum[i % 4 / 2]));
        p = p == -INFINITY ? 0.0f : weight;
      }
      if constexpr (Kv::kHasCodes) {
        Kv::store(weights(), shared_.weight_scales[group_ * kTileRows], stage, sub, s[u]);
      } else {
        Kv::store(weights(), sub, s[u]);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* low = s[u][0] + half * 2;
        const float* high = s[u][1] + half * 2;
        float sum = (low[0] + low[1]) + (high[0] + high[1]);
        sum += warp_shuffle_xor(sum, 1);
        sum += warp_shuffle_xor(sum, 2);
        if (lane_ % 4 == 0) shared_.sums[row_at(half)][sub] = sum;
      }
    }
  }

  __device__ __forceinline__ void take_sums(State& state, const float (&keep)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      state.sum[half] *= keep[half];
#pragma unroll
      for (int sub = 0; sub < kSubs; sub++) state.sum[half] += shared_.sums[row_at(half)][sub];
    }
  }

  const Attention& a_;
  typename Shape::Shared& shared_;
  Tile tile_;
  int lane_, group_, split_;
  int token_, shift_;
  int low_[2], high_[2];  // the tokens that rows g and g + 8 see
};

// Runs `of_block` over a tile's blocks, each in shared memory when it is called.
template <class Kv, class Block, class OfBlock>
__device__ __forceinline__ void for_each_block(Block& work, OfBlock&& of_block) {
  const int end = work.end_block();
  int block = work.first_block();
  if (Kv::kStages == 2 || block >= end) work.load(block);
  for (; block < end; block++) {
    if constexpr (Kv::kStages == 2) {
      copy_wait<0>();
      __syncthreads();
      if (block + 1 < end) work.load(block + 1);
    } else {
      __syncthreads();
      work.load(block);
      copy_wait<0>();
      __syncthreads();
    }
    of_block(block);
  }
  copy_wait<0>();
}

// A piece of work of rows with few queries: a tile, a part and a KV head.
__device__ __forceinline__ Tile few_tile(const Attention& a, int piece) {
  const int row = row_of(a.plan.few, a.rows, piece / a.kv_heads);
  const RowContext c = a.plan.contexts[row];
  const int index = piece / a.kv_heads - a.plan.few[row], part = c.first_part + index % c.num_parts;
  const int first = index / c.num_parts * kTileRows;
  return {c, row, piece % a.kv_heads, first, min(c.queries * a.group() - first, kTileRows),
          part, part + 1, c.begin, c.end};
}

// A tile of a row with many queries, with the tokens that its own queries see.
__device__ __forceinline__ Tile many_tile(const Attention& a, int piece, int rows_of_tile) {
  const int row = row_of(a.plan.many, a.rows, piece / a.kv_heads);
  const RowContext c = a.plan.contexts[row];
  const int first = (piece / a.kv_heads - a.plan.many[row]) * rows_of_tile, group = a.group();
  const int count = min(c.queries * group - first, rows_of_tile);
  const int begin = a.begin_of_context(c.first + first / group);
  const int end = min(a.end_of_context(c.first + (first + count - 1) / group), a.kv_lens[row]);
  return {c, row, piece % a.kv_heads, first, count, begin / kPart, INT32_MAX / kPart, begin, end};
}

// Calls of_piece(piece) for the pieces of work that this block takes, in the order of their numbers.
template <class OfPiece>
__device__ __forceinline__ void take_pieces(int total, int32_t* queue, int* next, OfPiece&& of_piece) {
  for (int piece = int(blockIdx.x); piece < total;) {
    if (threadIdx.x == 0) *next = int(gridDim.x) + atomicAdd(queue, 1);
    of_piece(piece);
    __syncthreads();
    piece = *next;
    __syncthreads();
  }
}

template <class Kv, int Split>
__device__ __forceinline__ void attend_part(const Attention& a, typename BlockShape<Kv, 1, Split>::Shared& shared,
                                            int piece) {
  AttendBlock<Kv, 1, Split> work(a, shared);
  const Tile tile = few_tile(a, piece);
  work.start(tile);
  typename AttendBlock<Kv, 1, Split>::State state;
  state.clear();
  for_each_block<Kv>(work, [&](int block) { work.add(block, state); });
  if (tile.context.num_parts == 1) return work.write(state);
  work.write_partial(state);
  if (work.is_last(&shared.is_last)) work.merge_parts();
}

template <class Kv, int Groups, int Split>
__device__ __forceinline__ void attend_tile(const Attention& a, typename BlockShape<Kv, Groups, Split>::Shared& shared,
                                            int piece) {
  AttendBlock<Kv, Groups, Split> work(a, shared);
  work.start(many_tile(a, piece, Groups * kTileRows));
  typename AttendBlock<Kv, Groups, Split>::State whole, state;
  whole.clear();
  state.clear();
  for_each_block<Kv>(work, [&](int block) {
    work.add(block, state);
    if ((block + 1) % (kPart / Kv::kTokens) != 0 && block + 1 < work.end_block()) return;
    work.merge(whole, state);
    state.clear();
  });
  work.write(whole);
}

// Blocks of attend_parts that shall share a multiprocessor, as they hide each other's latency: up to
// three of those with 227 KiB of shared memory, of which each has one more KiB.
constexpr int parts_beside(size_t shared_bytes) {
  return int(std::max<size_t>(std::min<size_t>((227 << 10) / (shared_bytes + (1 << 10)), 3), 1));
}

// Of rows with few queries.
template <class Kv, int Split>
__global__ void
__launch_bounds__(Split* kWarp, parts_beside(sizeof(typename BlockShape<Kv, 1, Split>::Shared))) attend_parts(Attention a) {
  using Shared = typename BlockShape<Kv, 1, Split>::Shared;
  auto* shared = shared_memory<unsigned char>();
  take_turn();
  const int total = a.plan.few[a.rows] * a.kv_heads;
  take_pieces(total, a.plan.taken, reinterpret_cast<int*>(shared),
              [&](int piece) { attend_part<Kv, Split>(a, *reinterpret_cast<Shared*>(shared + 16), piece); });
}

// Of rows with many, those with long contexts before others.
template <class Kv, int Groups, int Split>
__global__ void __launch_bounds__(Groups* Split* kWarp) attend_tiles(Attention a) {
  using Shared = typename BlockShape<Kv, Groups, Split>::Shared;
  auto* shared = shared_memory<unsigned char>();
  take_turn();
  const int total = a.plan.many[a.rows] * a.kv_heads;
  take_pieces(total, a.plan.taken + 1, reinterpret_cast<int*>(shared), [&](int piece) {
    attend_tile<Kv, Groups, Split>(a, *reinterpret_cast<Shared*>(shared + 16), total - 1 - piece);
  });
}

// Launches the kernels of one type of KV: Groups x Split warps share a tile of rows with many queries,
// PartSplit one of rows with few. The two have kernels of their own, as they need other registers.
template <class Kv, int Groups, int Split, int PartSplit>
void attend_with(const Attention& a, const Pieces& pieces) {
  using Many = BlockShape<Kv, Groups, Split>;
  using Few = BlockShape<Kv, 1, PartSplit>;
  constexpr size_t kManyBytes = 16 + sizeof(typename Many::Shared), kFewBytes = 16 + sizeof(typename Few::Shared);
  if (context.is_measured) return;
  static const int tiles = resident_blocks(attend_tiles<Kv, Groups, Split>, Many::kThreads, kManyBytes);
  static const int parts = resident_blocks(attend_parts<Kv, PartSplit>, Few::kThreads, kFewBytes);
  const auto grid = [](int64_t count, int most) { return dim3{unsigned(std::min<int64_t>(count, most))}; };
  launch_early(attend_tiles<Kv, Groups, Split>, grid(pieces.many, tiles), Many::kThreads, kManyBytes, a);
  launch_early(attend_parts<Kv, PartSplit>, grid(pieces.few, parts), Few::kThreads, kFewBytes, a);
}

}  // namespace cadenza::cuda
