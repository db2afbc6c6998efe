// LM head and the choice of tokens.
//
// The product's logits are in the workspace. A block reads a slice of a row's vocabulary once for all
// that can be decided by slices: whether logits are finite, the largest one, a draw without filters,
// the parts of log probabilities, and token rules. Then a block for each row merges its slices; only
// filters, and the rank of a token whose logprobs are wanted, make it read the row again.
#include "cuda/bodies.h"
#include "cuda/product.h"
#include "cuda/sampling_filters.h"
#include "cuda/sampling_rules.h"

namespace cadenza::cuda {

namespace {

// Rows whose logits are in memory at the same time.
constexpr int64_t kRowsAtOnce = 256;

// Logits that a thread has of its block's slice, side by side with those of the other threads.
class Slice {
 public:
  __device__ Slice(const Sampling& task, int row, int slice)
      : task_(task), begin_(slice * kSlice), logits_(task.logits + int64_t(row) * task.pitch) {}

  __device__ int begin() const { return begin_; }
  __device__ int place(int i) const { return i * int(kSliceThreads) + int(threadIdx.x); }
  __device__ int id(int i) const { return begin_ + place(i); }
  __device__ bool has(int i) const { return id(i) < task_.vocab; }

  // Reads and transforms the logits; behind the vocabulary they are below all others. Returns the
  // largest magnitude's bits before the transform, which could hide an infinite one.
  __device__ uint32_t read(float (&values)[kPerThread]) const {
    uint32_t largest = 0;
    for (int i = 0; i < kPerThread; i++) values[i] = has(i) ? logits_[id(i)] : 0.0f;
    for (int i = 0; i < kPerThread; i++) largest = max(largest, as_bits<uint32_t>(values[i]) & 0x7fffffffu);
    transform(values);
    for (int i = 0; i < kPerThread; i++) values[i] = has(i) ? values[i] : -__builtin_inff();
    return largest;
  }

  __device__ void write(float* row, const float (&values)[kPerThread]) const {
    for (int i = 0; i < kPerThread; i++) {
      if (has(i)) row[id(i)] = values[i];
    }
  }

 private:
  __device__ void transform(float (&values)[kPerThread]) const {
    const float divisor = task_.transform.divisor, cap = task_.transform.soft_cap;
    if (divisor != 1.0f) {
      for (float& value : values) value /= divisor;
    }
    if (cap == 0.0f) return;
    for (float& value : values) value = tanh_of(value / cap) * cap;
  }

  const Sampling& task_;
  const int begin_;
  float* const logits_;
};

// Writes the largest keys of the slice in descending order; keys are unique, so each is below the one
// before. Returns the first.
__device__ uint64_t list_tops(const Slice& slice, const float (&values)[kPerThread], uint64_t* partials,
                              uint64_t* tops) {
  uint64_t first = 0, last = ~uint64_t(0);
  for (int place = 0; place < kTopLogprobs; place++) {
    uint64_t best = 0;
    for (int i = 0; i < kPerThread; i++) {
      const uint64_t key = key_of(values[i], slice.id(i));
      if (key < last && key > best) best = key;
    }
    last = block_merge<Larger>(best, partials);
    if (place == 0) first = last;
    if (threadIdx.x == 0) tops[place] = last;
  }
  return first;
}

__device__ void apply_rules(const Sampling& task, const Settings& settings, const Slice& slice,
                            float (&values)[kPerThread]) {
  __shared__ RuledSlice ruled;
  for (int i = 0; i < kPerThread; i++) {
    ruled.values[slice.place(i)] = values[i];
    ruled.counts[slice.place(i)] = 0;
    ruled.is_in_context[slice.place(i)] = 0;
  }
  SliceRules(task.rules, settings, slice.begin(), ruled).apply();
  __syncthreads();
  for (int i = 0; i < kPerThread; i++) {
    values[i] = slice.has(i) ? ruled.values[slice.place(i)] : -__builtin_inff();
  }
}

// A block for each slice and row. Logits that are wanted later are written back where they changed.
__global__ void __launch_bounds__(kSliceThreads, 4) slice_kernel(const Sampling task) {
  take_turn();
  const int row = int(blockIdx.y), index = int(blockIdx.x);
  if (task.first + row >= *task.count) return;
  __shared__ uint64_t partials[kSliceThreads / kWarp];
  const Settings settings = settings_of(task, row);
  const Slice slice(task, row, index);
  float values[kPerThread];
  const uint64_t largest = block_merge<Larger>(uint64_t(slice.read(values)), partials);
  SlicePart part{0, 0, uint32_t(largest)};
  if (settings.has_logprobs()) {
    uint64_t* tops = task.tops + (int64_t(row) * task.slices + index) * kTopLogprobs;
    const float most = value_of(list_tops(slice, values, partials, tops));
    uint64_t sum = 0;
    for (float value : values) sum += in_units(exp_of(value - most));
    part.exponentials = block_merge<Sum>(sum, partials);
    slice.write(task.logits + int64_t(row) * task.pitch, values);
  }
  if (settings.record != nullptr) apply_rules(task, settings, slice, values);
  for (int i = 0; i < kPerThread; i++) {
    if (slice.id(i) == task.banned) values[i] = -__builtin_inff();
  }
  if (settings.draws()) {
    for (float& value : values) value /= settings.temperature;
    if (settings.filters()) slice.write(task.choices + int64_t(row) * task.pitch, values);
  }
  if (settings.draws() && !settings.filters()) {
    for (int i = 0; i < kPerThread; i++) part.best = Larger{}(part.best, drawn_key(values[i], slice.id(i), settings));
  } else {
    for (int i = 0; i < kPerThread; i++) part.best = Larger{}(part.best, key_of(values[i], slice.id(i)));
  }
  part.best = block_merge<Larger>(part.best, partials);
  if (threadIdx.x == 0) task.parts[int64_t(row) * task.slices + index] = part;
}

// Merges the slices of a row.
class RowResult {
 public:
  __device__ RowResult(const Sampling& task, int row, FilterMemory& memory)
      : task_(task),
        settings_(settings_of(task, row)),
        parts_(task.parts + int64_t(row) * task.slices),
        tops_(task.tops + int64_t(row) * task.slices * kTopLogprobs),
        logits_(task.logits + int64_t(row) * task.pitch),
        choices_(task.choices + int64_t(row) * task.pitch),
        out_(task.out + int64_t(row) * kSampleColumns),
        memory_(memory) {}

  __device__ void write() const {
    const bool is_finite = settings_.is_valid && merged([](const SlicePart& part) {
                             return uint64_t(part.largest_bits);
                           }) < kInfiniteBits;
    const uint64_t best = merged([](const SlicePart& part) { return part.best; });
    const bool bans_all = settings_.record != nullptr && best == 0;
    const int token = settings_.chooses() ? id_of(is_finite ? drawn(best) : best) : (settings_.is_valid ? settings_.target : 0);
    if (threadIdx.x == 0) {
      out_[kColumnToken] = token;
      out_[kColumnState] = is_finite ? (bans_all ? kStateNoneAllowed : kStateChosen) : kStateNotFinite;
    }
    if (settings_.has_logprobs()) write_logprobs(logits_[token]);
  }

 private:
  template <class Part>
  __device__ uint64_t merged(const Part& part_of) const {
    uint64_t best = 0;
    for (int i = int(threadIdx.x); i < task_.slices; i += int(blockDim.x)) best = Larger{}(best, part_of(parts_[i]));
    return block_merge<Larger>(best, memory_.partials);
  }

  // The key of the row's token, from that of what it is chosen by.
  __device__ uint64_t drawn(uint64_t best) const {
    if (best == 0 || !settings_.filters()) return best;
    RowFilters filters(choices_, task_.vocab, value_of(best), memory_);
    filters.apply(settings_);
    return filters.draw(settings_);
  }

  __device__ void write_logprobs(float chosen) const {
    uint64_t last = ~uint64_t(0);
    float total = 0.0f;
    for (int i = 0; i < kTopLogprobs; i++) {
      last = top_below(last);
      if (i == 0) total = log_sum_exp(value_of(last));
      if (threadIdx.x != 0) continue;
      out_[kColumnTop + i] = id_of(last);
      out_[kColumnTop + kTopLogprobs + i] = as_bits<int32_t>(value_of(last) - total);
    }
    uint64_t above = 0;
#pragma unroll 8
    for (int i = int(threadIdx.x); i < task_.vocab; i += int(blockDim.x)) above += logits_[i] > chosen ? 1 : 0;
    above = block_merge<Sum>(above, memory_.partials);
    if (threadIdx.x != 0) return;
    out_[kColumnLogprob] = as_bits<int32_t>(chosen - total);
    out_[kColumnRank] = int32_t(1 + above);
  }

  // The largest key of the slices' tops below one; 0 if there is none.
  __device__ uint64_t top_below(uint64_t last) const {
    uint64_t best = 0;
    for (int i = int(threadIdx.x); i < task_.slices * kTopLogprobs; i += int(blockDim.x)) {
      if (tops_[i] < last && tops_[i] > best) best = tops_[i];
    }
    return block_merge<Larger>(best, memory_.partials);
  }

  __device__ float log_sum_exp(float largest) const {
    uint64_t sum = 0;
    for (int i = int(threadIdx.x); i < task_.slices; i += int(blockDim.x)) {
      const float share = exp_of(value_of(tops_[int64_t(i) * kTopLogprobs]) - largest);
      if (share > 0.0f) sum += uint64_t(double(parts_[i].exponentials) * double(share));
    }
    const float total = float(double(block_merge<Sum>(sum, memory_.partials)) * 0x1p-40);
    return largest + log_of(total);
  }

  const Sampling& task_;
  const Settings settings_;
  const SlicePart* parts_;
  const uint64_t* tops_;
  const float* logits_;
  const float* choices_;
  int32_t* out_;
  FilterMemory& memory_;
};

// A block for each row; rows behind the count get zeros, as do columns that nobody asked for.
__global__ void __launch_bounds__(kRowThreads, 2) row_kernel(const Sampling task) {
  take_turn();
  const int row = int(blockIdx.x);
  int32_t* out = task.out + int64_t(row) * kSampleColumns;
  if (int(threadIdx.x) < kSampleColumns) out[threadIdx.x] = 0;
  if (task.first + row >= *task.count) return;
  __syncthreads();
  RowResult(task, row, *shared_memory<FilterMemory>()).write();
}

}  // namespace

}  // namespace cadenza::cuda

namespace cadenza::xla_ffi {

namespace {

using cuda::ProductTask;
using cuda::Sampling;
using cuda::Workspace;

cuda::RuleMemory rule_memory(const Any& records, const Any& page_table, const Any& history,
                             int64_t page_size, int64_t vocab) {
  cuda::RuleMemory memory{};
  if (records.element_count() == 0) return memory;
  require(page_size > 0, "the page size must be above 0");
  require(dim(records, 1) == rule_words(vocab), "rules must be int32 [L, W]");
  memory.records = int32(records);
  memory.page_table = int32(page_table);
  memory.history = int32(history);
  memory.num_records = int(dim(records, 0));
  memory.record_words = int(dim(records, 1));
  memory.rows = int(dim(page_table, 0));
  memory.pages = int(dim(page_table, 1));
  memory.page_size = int(page_size);
  memory.history_pages = int(int64_t(history.element_count()) / page_size);
  return memory;
}

void take_memory(Sampling& task, Workspace& workspace, int64_t rows) {
  task.logits = workspace.take<float>(rows * task.pitch);
  task.choices = workspace.take<float>(rows * task.pitch);
  task.parts = workspace.take<cuda::SlicePart>(rows * task.slices);
  task.tops = workspace.take<uint64_t>(rows * task.slices * kTopLogprobs);
}

// Some rows at a time, so that memory has an end. The results of the rows behind those that are
// computed become zeros with the last.
void run(Sampling task, const ProductTask& head, Workspace& workspace, int64_t padded) {
  const int64_t x_bytes = head.k * bytes_of(head.x_type);
  for (int64_t first = 0; first == 0 || first < head.rows; first += cuda::kRowsAtOnce) {
    const int64_t rows = std::min(head.rows - first, cuda::kRowsAtOnce);
    const bool is_last = first + rows == head.rows;
    ProductTask product = head;
    product.rows = rows;
    product.x = static_cast<const char*>(head.x) + first * x_bytes;
    product.out = task.logits;
    if (first > 0) product.count = nullptr;  // it counts from the first row on
    Workspace own = workspace;
    cuda::product(product, own);
    task.first = int(first);
    cuda::launch_early(cuda::slice_kernel, dim3{unsigned(task.slices), unsigned(rows)}, cuda::kSliceThreads, 0, task);
    cuda::launch_early(cuda::row_kernel, dim3{unsigned(is_last ? padded - first : rows)}, cuda::kRowThreads,
                       sizeof(cuda::FilterMemory), task);
    task.out += rows * kSampleColumns;
  }
}

}  // namespace

// Masses are summed exactly, so that thresholds of top-p differ from the CPU's by rounding.
void execute(const calls::next_token& c) {
  const int64_t padded = dim(c.out, 0);
  require(c.divisor > 0 && c.soft_cap >= 0, "the divisor must be above 0, the soft cap at least 0");
  require(c.out.element_type() == ffi::S32 && dim(c.out, 1) == kSampleColumns,
          "the result must be int32 [L, 44]");
  require(dim(c.columns, 0) == kNumLogitColumns && dim(c.columns, 1) >= padded,
          "the logit rows must be int32 [columns, L]");
  Sampling task{};
  task.columns = int32(c.columns);
  task.count = device_count(c.count);
  task.stride = int(dim(c.columns, 1));
  task.vocab = int(c.vocab);
  task.slices = int(ceil_div(c.vocab, int64_t(cuda::kSlice)));
  task.pitch = ceil_div(c.vocab, int64_t(cuda::kWarp)) * cuda::kWarp;
  task.transform = {c.divisor, c.soft_cap};
  task.banned = int(c.banned);
  task.rules = rule_memory(c.records, c.page_table, c.history, c.page_size, c.vocab);
  task.has_row_keys = has_fault(Fault::kRowKey);
  task.out = static_cast<int32_t*>(c.out.untyped_data());
  ProductTask product{};
  product.rows = cuda::rows_to_compute(padded);
  product.n = c.vocab;
  product.k = dim(c.x, 1);
  product.x = c.x.untyped_data();
  product.x_type = product_types(c.x, c.head).activation;
  product.w = weight_of(c.head);
  product.out_is_f32 = true;
  product.count = task.count;
  product.out_stride = task.pitch;
  require(dim(c.x, 0) >= product.rows, "x has too few rows");
  require(cuda::fits(product.w, 0, product.n, product.k), "the head's shape does not fit the vocabulary");
  Workspace workspace;
  take_memory(task, workspace, std::min(product.rows, cuda::kRowsAtOnce));
  run(task, product, workspace, padded);
}

}  // namespace cadenza::xla_ffi
