// Attention of image towers: queries of an image over its rows, without pages.
//
// Queries, keys and values are rows, each head behind the other. A block is a tile of queries of one
// head, of which a warp has some; keys are added in blocks of 32 rows from the image's first row, a
// lane for each score, so a query's result depends neither on its tile nor on its block of rows.
#include "core/encoder_tasks.h"
#include "cuda/attention_math.h"
#include "cuda/bodies.h"

namespace cadenza::cuda {

namespace {

constexpr int kWarps = 4, kOwn = 4;  // warps of a block, and queries of a warp
constexpr int kTile = kWarps * kOwn;
constexpr int kMaxSize = 128, kColumns = kMaxSize / kWarp;

// Queries and keys [H, rows, size], values [H, rows, columns].
struct ImageHeads {
  int heads, rows, size, columns;
};

// Rows of an image; what the host does not know is on the device.
struct RowBlock {
  const int32_t* start;
  const int32_t* count;
  int most;  // rows, whatever the count is

  __device__ __forceinline__ int rows() const { return min(max(*count, 0), most); }
};

struct Kept {
  int rotary;
  const float* turns;  // [B, rotary]; or null
  const float* q_weight;
  const float* k_weight;
  bool norms_values;
  float eps;
};

template <class T>
struct Sides {
  T *queries, *keys, *values;
};

// A block of one warp is a head of a row's queries, keys or values.
template <class T>
__global__ void keep_heads_kernel(ImageHeads heads, RowBlock block, Kept kept, const T* qkv, Sides<T> sides) {
  __shared__ float work[kMaxSize], turned[kMaxSize];
  const int row = int(blockIdx.x), side = int(blockIdx.y) / heads.heads, head = int(blockIdx.y) % heads.heads;
  const int at = *block.start + row;
  if (row >= block.rows() || at < 0 || at >= heads.rows) return;
  const T* from = qkv + ((int64_t(row) * 3 + side) * heads.heads + head) * heads.size;
  const float* weight = side == 0 ? kept.q_weight : side == 1 ? kept.k_weight : nullptr;
  const bool is_normed = side == 2 ? kept.norms_values : weight != nullptr;
  float sum = 0.0f;
  for (int i = int(threadIdx.x); i < heads.size; i += kWarp) {
    work[i] = to_float(from[i]);
    sum = fmaf(work[i], work[i], sum);
  }
  const float scale = is_normed ? 1.0f / sqrtf(warp_sum(sum) / float(heads.size) + kept.eps) : 1.0f;
  const int half = side < 2 && kept.turns != nullptr ? kept.rotary / 2 : 0;
  for (int i = int(threadIdx.x); is_normed && i < heads.size; i += kWarp) {
    work[i] = weight == nullptr ? work[i] * scale : work[i] * scale * weight[i];
  }
  __syncthreads();
  const float* cosine = kept.turns + int64_t(row) * kept.rotary;
  for (int i = int(threadIdx.x); i < heads.size; i += kWarp) {
    if (i < half) {
      turned[i] = fmaf(-work[i + half], cosine[half + i], work[i] * cosine[i]);
    } else if (i < 2 * half) {
      turned[i] = fmaf(work[i - half], cosine[i], work[i] * cosine[i - half]);
    } else {
      turned[i] = work[i];
    }
  }
  const int width = side == 2 ? heads.columns : heads.size;
  T* to = (side == 0 ? sides.queries : side == 1 ? sides.keys : sides.values) + (int64_t(head) * heads.rows + at) * width;
  for (int i = int(threadIdx.x); i < heads.size; i += kWarp) to[i] = from_float<T>(turned[i]);
}

struct Encode {
  ImageHeads heads;
  RowBlock block;
  const int32_t* num_rows;
  const int32_t* bounds;  // [B, 2]; or null
  float scale;            // times log2 e
};

// Rows from `begin` to `end` - 1.
struct Range {
  int begin, end;
};

// Of one query: numerators of the lane's columns.
struct QueryState {
  float maximum, sum;
  float numerator[kColumns];
};

struct alignas(16) Stage {
  float queries[kTile][kMaxSize];
  float keys[kWarp][kMaxSize + 1], values[kWarp][kMaxSize];
};

// Loads 32 rows, those behind the image as zeros.
template <class T>
__device__ __forceinline__ void load_rows(const Encode& e, const Sides<T>& sides, Stage& stage, int first, int end) {
  const int size = e.heads.size, head = int(blockIdx.y);
  for (int i = int(threadIdx.x); i < kWarp * size; i += kWarps * kWarp) {
    const int lane = i / size, at = i % size, row = first + lane;
    const int64_t place = int64_t(head) * e.heads.rows + row;
    stage.keys[lane][at] = row < end ? to_float(sides.keys[place * size + at]) : 0.0f;
    stage.values[lane][at] = row < end ? to_float(sides.values[place * e.heads.columns + at]) : 0.0f;
  }
}

// Adds the rows in the stage, of which the query sees those from `low` to `high` - 1.
__device__ __forceinline__ void add_rows(const Encode& e, const Stage& stage, const float* query, Range seen, QueryState& state) {
  const int lane = int(threadIdx.x) % kWarp, size = e.heads.size;
  float score = 0.0f;
  for (int i = 0; i < size; i++) score = fmaf(query[i], stage.keys[lane][i], score);
  const bool is_seen = lane >= seen.begin && lane < seen.end;
  score = is_seen ? score * e.scale : -INFINITY;
  const float maximum = fmaxf(state.maximum, warp_max(score));
  const float keep = state.sum == 0.0f ? 0.0f : exp2_of(state.maximum - maximum);
  const float weight = is_seen ? exp2_of(score - maximum) : 0.0f;
  state.sum = fmaf(state.sum, keep, warp_sum(weight));
  state.maximum = maximum;
#pragma unroll
  for (int c = 0; c < kColumns; c++) state.numerator[c] *= keep;
  for (int row = 0; row < kWarp; row++) {
    const float w = warp_shuffle(weight, row);
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int column = c * kWarp + lane;
      if (column < size) state.numerator[c] = fmaf(w, stage.values[row][column], state.numerator[c]);
    }
  }
}

template <class T>
__global__ void encode_kernel(Encode e, Sides<T> sides, T* out) {
  __shared__ Stage stage;
  const int size = e.heads.size, head = int(blockIdx.y), lane = int(threadIdx.x) % kWarp;
  const int own = int(threadIdx.x) / kWarp * kOwn, first = int(blockIdx.x) * kTile, rows = e.block.rows();
  const int start = *e.block.start, end = min(max(*e.num_rows, 0), e.heads.rows);
  if (first >= rows || start < 0 || start + rows > e.heads.rows) return;
  for (int i = int(threadIdx.x); i < kTile * size; i += kWarps * kWarp) {
    const int row = first + i / size;
    const int64_t place = int64_t(head) * e.heads.rows + start + row;
    stage.queries[i / size][i % size] = row < rows ? to_float(sides.queries[place * size + i % size]) : 0.0f;
  }
  Range bounds[kOwn];
  QueryState states[kOwn];
#pragma unroll
  for (int q = 0; q < kOwn; q++) {
    const int row = first + own + q;
    bounds[q] = {0, row < rows ? end : 0};
    if (e.bounds != nullptr && row < rows) {
      bounds[q] = {max(e.bounds[2 * row], 0), min(e.bounds[2 * row + 1], end)};
    }
    states[q] = {-INFINITY, 0.0f, {}};
  }
  for (int at = 0; at < end; at += kWarp) {
    __syncthreads();
    load_rows(e, sides, stage, at, end);
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kOwn; q++) {
      const Range seen{max(bounds[q].begin - at, 0), min(bounds[q].end - at, kWarp)};
      if (seen.begin < seen.end) add_rows(e, stage, stage.queries[own + q], seen, states[q]);
    }
  }
#pragma unroll
  for (int q = 0; q < kOwn; q++) {
    const int row = first + own + q;
    if (row >= rows) continue;
    const float inverse = bounds[q].begin < bounds[q].end ? 1.0f / states[q].sum : 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int column = c * kWarp + lane;
      if (column >= size) continue;
      out[(int64_t(row) * e.heads.heads + head) * size + column] = from_float<T>(states[q].numerator[c] * inverse);
    }
  }
}

template <class T>
Sides<T> sides_of(const xla_ffi::Any& queries, const xla_ffi::Any& keys, const xla_ffi::Any& values) {
  return {static_cast<T*>(queries.untyped_data()), static_cast<T*>(keys.untyped_data()),
          static_cast<T*>(values.untyped_data())};
}

template <class T>
void keep(const ImageHeads& heads, const RowBlock& block, const Kept& kept, const void* qkv, const Sides<T>& sides) {
  const dim3 grid{unsigned(block.most), unsigned(3 * heads.heads)};
  launch(keep_heads_kernel<T>, grid, kWarp, 0, heads, block, kept, static_cast<const T*>(qkv), sides);
}

template <class T>
void encode(const Encode& task, const Sides<T>& sides, void* out) {
  const dim3 grid{unsigned(ceil_div(task.block.most, kTile)), unsigned(task.heads.heads)};
  launch(encode_kernel<T>, grid, kWarps * kWarp, 0, task, sides, static_cast<T*>(out));
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

cuda::ImageHeads heads_of(const Any& queries, const Any& keys, const Any& values, DType dtype) {
  const ffi::DataType type = dtype == DType::kBf16 ? ffi::U16 : ffi::F32;
  require(queries.element_type() == type && keys.element_type() == type && values.element_type() == type,
          "queries, keys and values must have the type of the activations, bf16 as u16");
  const cuda::ImageHeads heads{int(dim(queries, 0)), int(dim(queries, 1)), int(dim(queries, 2)), int(dim(values, 2))};
  require(heads.size <= cuda::kMaxSize, "heads of towers have at most 128 values on a GPU");
  require(heads.columns >= heads.size && keys.element_count() == queries.element_count() &&
              dim(values, 0) == heads.heads && dim(values, 1) == heads.rows,
          "keys must be [H, N, D], and values [H, N, D rounded up to 16]");
  return heads;
}

cuda::RowBlock block_of(const Any& start, const Any& count, const Any& rows) {
  return {device_count(start), device_count(count), int(cuda::rows_to_compute(dim(rows, 0)))};
}

}  // namespace

void execute(const calls::keep_heads& c) {
  const DType dtype = element_type(c.qkv);
  require(c.queries_out.untyped_data() == c.queries.untyped_data() &&
              c.keys_out.untyped_data() == c.keys.untyped_data() &&
              c.values_out.untyped_data() == c.values.untyped_data(),
          "queries, keys and values must be updated in place");
  const cuda::ImageHeads heads = heads_of(c.queries, c.keys, c.values, dtype);
  require(dim(c.qkv, 1) == int64_t(3) * heads.heads * heads.size, "qkv must be [B, 3 H D]");
  const bool has_turns = c.turns.element_count() != 0;
  const int rotary = has_turns ? int(dim(c.turns, 1)) : 0;
  require(!has_turns || (dim(c.turns, 0) >= dim(c.qkv, 0) && rotary % 2 == 0 && rotary <= heads.size),
          "turns must be f32 [B, R], with an even R of at most D");
  const cuda::Kept kept{rotary,         optional_f32(c.turns), optional_f32(c.q_weight), optional_f32(c.k_weight),
                        c.norms_values, c.norm_eps};
  for (const Any* weight : {&c.q_weight, &c.k_weight}) {
    require(weight->element_count() == 0 || dim(*weight, 0) == heads.size,
            "the norms' weights must be f32 [D] or empty");
  }
  const cuda::RowBlock block = block_of(c.start, c.count, c.qkv);
  if (dtype == DType::kBf16) {
    cuda::keep(heads, block, kept, c.qkv.untyped_data(), cuda::sides_of<bf16>(c.queries, c.keys, c.values));
  } else {
    cuda::keep(heads, block, kept, c.qkv.untyped_data(), cuda::sides_of<float>(c.queries, c.keys, c.values));
  }
}

void execute(const calls::encode_attend& c) {
  const DType dtype = element_type(c.out);
  const cuda::ImageHeads heads = heads_of(c.queries, c.keys, c.values, dtype);
  require(dim(c.out, 1) == int64_t(heads.heads) * heads.size, "the result must be [B, H D]");
  const bool has_bounds = c.bounds.element_count() != 0;
  require(!has_bounds || (c.bounds.element_type() == ffi::S32 && dim(c.bounds, 0) >= dim(c.out, 0) &&
                          dim(c.bounds, 1) == 2),
          "bounds must be int32 [B, 2]");
  const cuda::Encode task{heads, block_of(c.start, c.count, c.out), device_count(c.num_rows),
                          has_bounds ? data<int32_t>(c.bounds) : nullptr, c.scale * cuda::kLog2e};
  if (dtype == DType::kBf16) {
    cuda::encode(task, cuda::sides_of<bf16>(c.queries, c.keys, c.values), c.out.untyped_data());
  } else {
    cuda::encode(task, cuda::sides_of<float>(c.queries, c.keys, c.values), c.out.untyped_data());
  }
}

}  // namespace cadenza::xla_ffi
