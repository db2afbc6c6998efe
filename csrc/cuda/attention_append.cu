// Queries are prepared and new keys and values written by a warp for each head of each token; the
// first block divides the rows.
#include "cuda/attention_append.h"

namespace cadenza::cuda {

namespace {

constexpr int kAppendWarps = 8;
constexpr int kMostHead = 512;
constexpr int kMostLatent = 1024;

__device__ RowContext context_of(const Attention& a, int row) {
  RowContext c{};
  c.first = a.query_starts[row];
  c.queries = a.query_starts[row + 1] - c.first;
  c.num_parts = 1;
  if (c.queries <= 0) return c;
  const int position = a.positions[c.first];
  c.begin = a.begin_of_context(c.first);
  c.end = min(a.end_of_context(c.first + c.queries - 1), a.kv_lens[row]);
  if (a.has(Fault::kRelativeSpans)) c.shift = (kPart - position / kSub * kSub % kPart) % kPart;
  if (c.end <= c.begin) return c;
  c.first_part = (c.begin + c.shift) / kPart;
  c.num_parts = (c.end + c.shift + kPart - 1) / kPart - c.first_part;
  return c;
}

// What a row needs of few and of many.
struct RowWork {
  int few, slots, many;
  __device__ void add(const RowWork& other) { few += other.few, slots += other.slots, many += other.many; }
};

__device__ RowWork work_of(const Attention& a, const RowContext& c, bool are_all_many) {
  if (c.queries <= 0) return {0, 0, 0};
  const int rows = c.queries * a.group();
  if (are_all_many || c.queries > kFewQueries) return {0, 0, (rows + a.many_rows - 1) / a.many_rows};
  return {(rows + kTileRows - 1) / kTileRows * c.num_parts, c.queries * c.num_parts, 0};
}

// The sum over the lanes before a lane and its own.
__device__ __forceinline__ RowWork warp_scan(RowWork sum) {
  const int lane = int(threadIdx.x) % kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const int from = max(lane - step, 0);
    const RowWork other{warp_shuffle(sum.few, from), warp_shuffle(sum.slots, from), warp_shuffle(sum.many, from)};
    if (lane >= step) sum.add(other);
  }
  return sum;
}

// Writes the rows' contexts and the sums before each row; returns the sums over all rows.
__device__ RowWork write_plan(const Attention& a, bool are_all_many) {
  __shared__ RowWork of_warps[kAppendWarps];
  const int warp = int(threadIdx.x) / kWarp;
  RowWork total{0, 0, 0};
  for (int first = 0; first < a.rows; first += kAppendWarps * kWarp) {
    const int row = first + int(threadIdx.x);
    RowContext c{};
    if (row < a.rows) c = context_of(a, row);
    const RowWork own = work_of(a, c, are_all_many);
    RowWork before = warp_scan(own);
    if (threadIdx.x % kWarp == kWarp - 1) of_warps[warp] = before;
    before.add({-own.few, -own.slots, -own.many});
    before.add(total);
    __syncthreads();
    for (int other = 0; other < kAppendWarps; other++) {
      if (other < warp) before.add(of_warps[other]);
      total.add(of_warps[other]);
    }
    __syncthreads();
    if (row >= a.rows) continue;
    c.slots = before.slots;
    a.plan.contexts[row] = c;
    a.plan.few[row] = before.few, a.plan.many[row] = before.many;
  }
  if (threadIdx.x == 0) a.plan.few[a.rows] = total.few, a.plan.many[a.rows] = total.many;
  return total;
}

// By a whole block.
__device__ void divide_rows(const Attention& a) {
  const int num_counters = a.rows * a.few_tiles * a.kv_heads;
  for (int i = int(threadIdx.x); i < num_counters; i += int(blockDim.x)) a.plan.parts[i] = 0;
  if (threadIdx.x < 2) a.plan.taken[threadIdx.x] = 0;
  if (write_plan(a, false).slots > a.num_slots) write_plan(a, true);
}

template <class T>
struct HeadWriter {
  const Attention& a;
  const HeadAppend& given;
  int token;
  WarpHead work;

  __device__ const T* row() const {
    return static_cast<const T*>(given.qkv) + int64_t(token) * (a.heads + given.kv_parts * a.kv_heads) * a.key_size;
  }

  // A query or key head, normed and rotated; `first` is the first head of its kind, `count` their number.
  __device__ void prepare(int head, int first, int count, const float* weight) {
    const int size = a.key_size;
    work.load(row() + head * size, size);
    if (weight != nullptr) {
      float inverse;
      if (given.norm_spans_heads) {
        inverse = inverse_rms(row() + first * size, count * size, given.norm_eps);
        weight += (head - first) * size;
      } else {
        inverse = inverse_rms(work.values, size, given.norm_eps);
      }
      for (int i = work.lane; i < size; i += kWarp) work.values[i] = work.values[i] * inverse * weight[i];
      warp_barrier();
    }
    const float* rope = given.rope + int64_t(rope_row(a, token, given.rope_rows)) * given.rope_columns;
    work.rotate(rope, 0, given.rotary_size);
  }

  __device__ void write_query(int head) {
    const int size = a.key_size;
    prepare(head, 0, a.heads, given.q_weight);
    if (given.rope_columns > given.rotary_size) {
      const int64_t position = rope_row(a, token, given.rope_rows);
      const float factor = given.rope[position * given.rope_columns + given.rotary_size];
      for (int i = work.lane; i < size; i += kWarp) work.values[i] *= factor;
    }
    const int64_t at = int64_t(token) * a.heads + head;
    if (!given.has_codes) return work.store(reinterpret_cast<T*>(given.queries) + at * size, size);
    warp_barrier();
    const Largest largest = Largest::of(work.values, size, work.lane);
    const float inverse = largest.inverse();
    char* coarse_codes = given.queries + 2 * at * size;
    for (int i = work.lane; i < size; i += kWarp) {
      const float exact = largest.has_codes() ? work.values[i] * inverse : 0.0f, coarse = rintf(exact);
      coarse_codes[i] = char(int(coarse));
      coarse_codes[size + i] = char(int(rintf((exact - coarse) * float(kFinePerCoarse))));
    }
    if (work.lane == 0) given.query_scales[at] = largest.scale(float(kFinePerCoarse));
  }

  // The token of the pool's layers and heads that a slot is.
  __device__ int64_t place_of(int slot, int kv_head) const {
    const int64_t page = slot / a.page_size;
    return ((page * a.num_layers + a.layer) * a.kv_heads + kv_head) * a.page_size + slot % a.page_size;
  }

  // Stores what the warp has as a key, or as a value.
  __device__ void write(int slot, int kv_head, bool is_key) {
    const int size = a.key_size;
    const int64_t place = place_of(slot, kv_head);
    char* pool = is_key ? given.k_pool : given.v_pool;
    if (!given.has_codes) return work.store(reinterpret_cast<T*>(pool) + place * size, size);
    for (int i = work.lane; i < size; i += kWarp) work.values[i] = to_float(from_float<T>(work.values[i]));
    warp_barrier();
    const Largest largest = Largest::of(work.values, size, work.lane);
    const float inverse = largest.inverse();
    char* block = pool + place / kSub * kSub * code_bytes(size);
    const int lane = int(place % kSub);
    for (int i = work.lane; i < size; i += kWarp) {
      const int code = largest.has_codes() ? int(rintf(work.values[i] * inverse)) : 0;
      if (is_key) {
        block[lane * size + i] = char(code ^ 0x80);
      } else {
        block[(lane / 4 * size + i) * 4 + lane % 4] = char(code);
      }
    }
    if (work.lane == 0) reinterpret_cast<float*>(block + kSub * size)[lane] = largest.scale(1.0f);
  }

  __device__ void write_value(int slot, int kv_head) {
    const int size = a.key_size;
    work.load(row() + (a.heads + (given.kv_parts - 1) * a.kv_heads + kv_head) * size, size);
    if (given.norms_values) {
      const float inverse = inverse_rms(work.values, size, given.norm_eps);
      for (int i = work.lane; i < size; i += kWarp) work.values[i] *= inverse;
      warp_barrier();
    }
    write(slot, kv_head, false);
  }
};

template <class T>
__global__ void __launch_bounds__(kAppendWarps* kWarp) append_kernel(Attention a, HeadAppend given) {
  __align__(16) __shared__ float work[kAppendWarps][kMostHead];
  take_turn();
  if (blockIdx.x == 0) return divide_rows(a);
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int heads = a.heads + (given.kv_parts > 0 ? 2 * a.kv_heads : 0);
  const int64_t index = int64_t(blockIdx.x - 1) * kAppendWarps + warp;
  const int token = int(index / heads), head = int(index % heads);
  if (token >= given.tokens || token >= a.query_starts[a.rows]) return;
  HeadWriter<T> writer{a, given, token, {work[warp], lane}};
  if (head < a.heads) return writer.write_query(head);
  const int slot = given.slot_mapping[token], kv_head = (head - a.heads) % a.kv_heads;
  if (slot < 0 || slot >= given.num_slots) return;
  if (head >= a.heads + a.kv_heads) return writer.write_value(slot, kv_head);
  writer.prepare(head, a.heads, a.kv_heads, given.k_weight);
  writer.write(slot, kv_head, true);
}

template <class T>
struct LatentWriter {
  const Attention& a;
  const LatentAppend& given;
  int token;
  WarpHead work;

  // Loads a part that is rotated behind the latent; pairs of neighbours become two halves.
  template <class From>
  __device__ void rotate(const From* from) {
    const int size = given.rotary_size, half = size / 2, first = a.value_size;
    for (int i = work.lane; i < half; i += kWarp) {
      const bool paired = given.pairs_neighbours;
      work.values[first + i] = to_float(from[paired ? 2 * i : i]);
      work.values[first + half + i] = to_float(from[paired ? 2 * i + 1 : half + i]);
    }
    warp_barrier();
    work.rotate(given.rope + int64_t(rope_row(a, token, given.rope_rows)) * size, first, size);
  }

  __device__ void write_query(int head) {
    const int64_t at = int64_t(token) * a.heads + head;
    work.load(static_cast<const T*>(given.absorbed) + at * a.value_size, a.value_size);
    rotate(static_cast<const T*>(given.queries) + (at + 1) * given.query_size - given.rotary_size);
    work.store(reinterpret_cast<T*>(given.prepared) + at * a.key_size, a.key_size);
  }

  __device__ void write_key(int slot) {
    const float* raw = given.keys + int64_t(token) * a.key_size;
    const float inverse = inverse_rms(raw, a.value_size, given.norm_eps);
    for (int i = work.lane; i < a.value_size; i += kWarp) work.values[i] = raw[i] * inverse * given.norm[i];
    rotate(raw + a.value_size);
    const int64_t page = slot / a.page_size;
    const int64_t place = (page * a.num_layers + a.layer) * a.page_size + slot % a.page_size;
    work.store(reinterpret_cast<T*>(given.pool) + place * a.key_size, a.key_size);
  }
};

template <class T>
__global__ void __launch_bounds__(kAppendWarps* kWarp) append_latents_kernel(Attention a, LatentAppend given) {
  __align__(16) __shared__ float work[kAppendWarps][kMostLatent];
  take_turn();
  if (blockIdx.x == 0) return divide_rows(a);
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int64_t index = int64_t(blockIdx.x - 1) * kAppendWarps + warp;
  const int token = int(index / (a.heads + 1)), head = int(index % (a.heads + 1));
  if (token >= given.tokens || token >= a.query_starts[a.rows]) return;
  LatentWriter<T> writer{a, given, token, {work[warp], lane}};
  if (head < a.heads) return writer.write_query(head);
  const int slot = given.slot_mapping[token];
  if (slot >= 0 && slot < given.num_slots) writer.write_key(slot);
}

dim3 append_grid(int64_t warps) { return {unsigned(1 + ceil_div(warps, kAppendWarps))}; }

}  // namespace

void append_heads(const Attention& a, const HeadAppend& given, bool is_f32) {
  const int heads = a.heads + (given.kv_parts > 0 ? 2 * a.kv_heads : 0);
  const dim3 grid = append_grid(int64_t(given.tokens) * heads);
  launch_early(is_f32 ? append_kernel<float> : append_kernel<bf16>, grid, kAppendWarps * kWarp, 0, a, given);
}

void append_latents(const Attention& a, const LatentAppend& given, bool is_f32) {
  const dim3 grid = append_grid(int64_t(given.tokens) * (a.heads + 1));
  launch_early(is_f32 ? append_latents_kernel<float> : append_latents_kernel<bf16>, grid, kAppendWarps * kWarp,
               0, a, given);
}

}  // namespace cadenza::cuda
