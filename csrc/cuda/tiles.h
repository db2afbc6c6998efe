// Products by tiles: a block computes some weight rows for some tokens, over K from its beginning to
// its end. Stages of 128 bytes of each row pass through shared memory, several on their way.
//
// A `Math` holds the sums of a block and says how a stage is multiplied:
//   T                      the type of activations and weight
//   kThreads               of a block
//   kRows, kTokens         weight rows and tokens of a block
//   kHalf                  of a gated product: kHalf rows of the gate, then kHalf of the other, and so on
//   multiply(w, x)         adds a stage's products, elements of K in ascending order
//   kReadsAhead            whether a stage is read into registers while the one before is multiplied;
//                          then load(w, x) gives what multiply(loaded) adds
//   each(visit)            visit(row, token, sum) of this thread's sums
//   each_pair(visit)       visit(row of the gate, token, gate, up)
#pragma once

#include "cuda/epilogue.h"

namespace cadenza::cuda {

constexpr int kStageBytes = 128;  // of a row: a line of the caches, and all banks
constexpr int kChunkBytes = 16;
constexpr int kChunks = kStageBytes / kChunkBytes;
template <class T>
constexpr int kStageElements = kStageBytes / int(sizeof(T));

// Where a chunk of a row is within a stage [rows, 128 bytes]: the same chunk of eight consecutive rows
// is in eight different groups of banks.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  return row * kStageBytes + (chunk ^ (row & 7)) * kChunkBytes;
}

// What this thread copies of `Rows` rows, stage by stage. Unless aligned to 16 bytes, by elements.
template <class T, int Rows, int Threads, bool Aligned>
class RowCopies {
  static constexpr int kCopies = Rows * kChunks / Threads, kElements = kChunkBytes / int(sizeof(T));
  static_assert(Rows * kChunks % Threads == 0 && Threads % kChunks == 0);

 public:
  // row_at(r) is where row r begins, or null for zeros.
  template <class RowAt>
  __device__ __forceinline__ explicit RowCopies(RowAt row_at) {
#pragma unroll
    for (int i = 0; i < kCopies; i++) {
      const T* row = row_at(first_row() + i * (Threads / kChunks));
      from_[i] = row == nullptr ? nullptr : row + chunk() * kElements;
    }
  }

  // Begins to copy the elements from `begin` on, of K; behind K are zeros.
  __device__ __forceinline__ void start(unsigned char* stage, int64_t begin, int64_t k) const {
    const int64_t left = k - begin - chunk() * kElements;
#pragma unroll
    for (int i = 0; i < kCopies; i++) {
      unsigned char* to = stage + chunk_at(first_row() + i * (Threads / kChunks), chunk());
      if constexpr (Aligned) {
        copy_async(to, from_[i] + begin, from_[i] != nullptr && left > 0);
      } else {
        for (int e = 0; e < kElements; e++) {
          reinterpret_cast<T*>(to)[e] = from_[i] != nullptr && e < left ? from_[i][begin + e] : T{};
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int chunk() { return int(threadIdx.x) % kChunks; }
  static __device__ __forceinline__ int first_row() { return int(threadIdx.x) / kChunks; }

  const T* from_[kCopies];
};

template <class T>
struct TiledProduct {
  const T* x;
  const T* w;
  int64_t rows, n, k, x_stride;
  const int32_t* count;  // or null
  Heads heads;
  Epilogue epilogue;
  bool is_backward = false;  // an injected fault: stages from the last on
};

template <class Math, int Stages>
constexpr size_t shared_bytes_of() {
  return size_t(Stages) * (Math::kRows + Math::kTokens) * kStageBytes;
}

// Which weight row, of [N, K], the block's row r is, or -1.
template <class Math, bool Gated>
__device__ __forceinline__ int64_t weight_row(int r, int64_t n) {
  if constexpr (Gated) {
    const int within = r % (2 * Math::kHalf);
    const int64_t column = int64_t(blockIdx.y) * (Math::kRows / 2) +
                           r / (2 * Math::kHalf) * Math::kHalf + within % Math::kHalf;
    if (column >= n / 2) return -1;
    return within < Math::kHalf ? column : n / 2 + column;
  } else {
    const int64_t row = int64_t(blockIdx.y) * Math::kRows + r;
    return row < n ? row : -1;
  }
}

template <class Math, bool Gated>
__device__ __forceinline__ void finish_block(const TiledProduct<typename Math::T>& p, Math& math) {
  Epilogue epilogue = p.epilogue;
  epilogue.out = static_cast<char*>(epilogue.out) + blockIdx.z * p.heads.out_bytes;
  const int64_t first = int64_t(blockIdx.x) * Math::kTokens;
  if constexpr (Gated) {
    math.each_pair([&](int r, int token, float gate, float up) {
      const int64_t column = weight_row<Math, true>(r, p.n);
      if (column >= 0 && first + token < p.rows) epilogue.finish_gated(first + token, column, gate, up);
    });
  } else {
    math.each([&](int r, int token, float sum) {
      const int64_t column = weight_row<Math, false>(r, p.n);
      if (column >= 0 && first + token < p.rows) epilogue.finish(first + token, column, sum);
    });
  }
}

// A barrier of a block's threads, which a single warp has for less.
template <int Threads>
__device__ __forceinline__ void block_barrier() {
  if constexpr (Threads == kWarp) {
    warp_barrier();
  } else {
    __syncthreads();
  }
}

// Adds the products of all stages of K to the sums of a block, whose rows the copies name. The weights
// of the first stages do not wait for the kernel before this one.
template <class Math, int Stages, class Weights, class Tokens>
__device__ __forceinline__ void multiply_stages(Math& math, const Weights& weights, const Tokens& tokens,
                                                const TiledProduct<typename Math::T>& p) {
  using T = typename Math::T;
  unsigned char* stages = shared_memory<unsigned char>();
  constexpr int kWeightBytes = Math::kRows * kStageBytes;
  constexpr int kBytes = kWeightBytes + Math::kTokens * kStageBytes;
  const int num_stages = int((p.k + kStageElements<T> - 1) / kStageElements<T>);
  auto begin_of = [&](int stage) {
    int64_t from = stage;
    if constexpr (kHasFaults) from = p.is_backward ? num_stages - 1 - stage : stage;
    return from * kStageElements<T>;
  };
  auto start_weights = [&](int stage) {
    if (stage < num_stages) weights.start(stages + stage % Stages * kBytes, begin_of(stage), p.k);
  };
  auto start_tokens = [&](int stage) {
    if (stage < num_stages) tokens.start(stages + stage % Stages * kBytes + kWeightBytes, begin_of(stage), p.k);
    copy_commit();
  };
  auto start = [&](int stage) { start_weights(stage), start_tokens(stage); };
  constexpr int kFirst = Math::kReadsAhead ? Stages : Stages - 1;
  for (int stage = 0; stage < kFirst; stage++) start_weights(stage);
  await_previous();
  for (int stage = 0; stage < kFirst; stage++) start_tokens(stage);
  auto at = [&](int stage) { return stages + stage % Stages * kBytes; };
  if constexpr (Math::kReadsAhead) {
    copy_wait<Stages - 1>();
    block_barrier<Math::kThreads>();
    auto loaded = math.load(at(0), at(0) + kWeightBytes), next = loaded;
    auto advance = [&](int stage, auto& now, auto& ahead) {
      copy_wait<Stages - 2>();
      block_barrier<Math::kThreads>();  // the next stage is there, and all have read this one
      start(stage + Stages);
      ahead = math.load(at(stage + 1), at(stage + 1) + kWeightBytes);
      math.multiply(now);
    };
    for (int stage = 0; stage < num_stages; stage += 2) {
      advance(stage, loaded, next);
      if (stage + 1 < num_stages) advance(stage + 1, next, loaded);
    }
  } else {
    for (int stage = 0; stage < num_stages; stage++) {
      copy_wait<Stages - 2>();
      block_barrier<Math::kThreads>();  // this stage is there, and nobody reads the last one's memory
      start(stage + Stages - 1);
      math.multiply(at(stage), at(stage) + kWeightBytes);
    }
  }
}

// Grid: blocks of tokens, which share weights, blocks of weight rows, heads.
template <class Math, int Stages, bool Gated, bool Aligned>
__global__ void __launch_bounds__(Math::kThreads) tiled_product(TiledProduct<typename Math::T> p) {
  using T = typename Math::T;
  start_next();
  const int64_t first = int64_t(blockIdx.x) * Math::kTokens;
  if (p.count != nullptr && first >= *p.count) return await_previous();
  const T* w = p.w + blockIdx.z * p.heads.w_bytes / int64_t(sizeof(T));
  const T* x = p.x + blockIdx.z * p.heads.x_bytes / int64_t(sizeof(T));
  const RowCopies<T, Math::kRows, Math::kThreads, Aligned> weights([&](int r) {
    const int64_t row = weight_row<Math, Gated>(r, p.n);
    return row < 0 ? nullptr : w + row * p.k;
  });
  const RowCopies<T, Math::kTokens, Math::kThreads, Aligned> tokens(
      [&](int r) { return first + r < p.rows ? x + (first + r) * p.x_stride : nullptr; });

  Math math;
  multiply_stages<Math, Stages>(math, weights, tokens, p);
  finish_block<Math, Gated>(p, math);
}

template <class Math, int Stages, bool Gated, bool Aligned>
void launch_tiles(const TiledProduct<typename Math::T>& p) {
  static_assert(Stages >= 2);
  const int64_t columns = Gated ? p.n / 2 : p.n, width = Gated ? Math::kRows / 2 : Math::kRows;
  const dim3 grid{unsigned(ceil_div(p.rows, Math::kTokens)), unsigned(ceil_div(columns, width)),
                  unsigned(p.heads.num)};
  launch_early(tiled_product<Math, Stages, Gated, Aligned>, grid, Math::kThreads, shared_bytes_of<Math, Stages>(), p);
}

template <class T>
TiledProduct<T> tiled(const ProductTask& task) {
  return {static_cast<const T*>(task.x), static_cast<const T*>(task.w.data),
          task.rows,  task.n, task.k, task.row_of_x(),
          task.count, task.heads,     epilogue_of(task),
          has_fault(Fault::kSumsByRows) && task.rows > 8};
}

// Whether all rows of x and w begin at multiples of 16 bytes.
template <class T>
bool is_aligned(const ProductTask& task) {
  const int64_t row_bytes = (task.k | task.row_of_x()) * int64_t(sizeof(T));
  return (row_bytes | task.heads.x_bytes | task.heads.w_bytes) % kChunkBytes == 0;
}

}  // namespace cadenza::cuda
