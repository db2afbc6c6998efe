#include "cuda/code_rows.h"

#include "cuda/codes.h"

namespace cadenza::cuda {

namespace {

constexpr int kWarps = 8;

struct Rows {
  const void* x;
  int64_t stride;      // elements from row to row
  int64_t head_bytes;  // from a head's x to the next
  int k, rows;
  const int32_t* count;
  const uint8_t* w;
  int64_t w_bytes;  // of one head's or expert's weight
  Pairs pairs;
  CodeRows out;
};

__device__ __forceinline__ uint32_t warp_largest(uint32_t value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint32_t other = warp_shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// Quantises the element of each lane; returns the largest magnitude, or 0 if all codes are 0.
__device__ __forceinline__ float quantise_group(float x, int8_t* codes, GroupTerms* terms) {
  const int lane = int(threadIdx.x) % kWarp;
  const uint32_t bits = warp_largest(as_bits<uint32_t>(x) & 0x7fffffffu);
  const float largest = as_bits<float>(bits);
  const bool is_used = bits >= kSmallestLargest && bits < 0x7f800000u;
  const int code = is_used ? int(rintf(x * (127.0f / largest))) : 0;
  codes[lane] = int8_t(code);
  int total = code;
  for (int mask = 8; mask > 0; mask /= 2) total += warp_shuffle_xor(total, mask);
  if (lane % 16 == 0) terms->totals[lane / 16] = int16_t(total);
  if (lane == 0) {
    const float undefined = as_bits<float>(0x7fc00000u);
    terms->scale = is_used ? largest / 127.0f : bits < kSmallestLargest ? 0.0f : undefined;
  }
  return is_used ? largest : 0.0f;
}

template <class T>
struct RowReader {
  const T* x;
  const int32_t* order;
  int k;

  __device__ __forceinline__ float at(int64_t group) const {
    const int i = int(group) * kGroup + int(threadIdx.x) % kWarp;
    if (i >= k) return 0.0f;
    return to_float(x[order == nullptr ? i : order[i]]);
  }
};

// A block has one span of groups of one row of one head.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) quantise_kernel(Rows rows) {
  __shared__ float largest_of[kRemainderSpan];
  const int row = int(blockIdx.x), warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  if (rows.count != nullptr && row / rows.pairs.chosen >= *rows.count) return;
  const int64_t source = row / rows.pairs.per_row;
  int64_t of_weight = blockIdx.z;
  if (device_order(rows.w) == nullptr) {
    if (row % rows.pairs.per_row != 0) return;
  } else if (rows.pairs.ids != nullptr) {
    of_weight = rows.pairs.ids[row];
    if (of_weight < 0 || of_weight >= rows.pairs.num_experts) return;
  }
  const int32_t* order = device_order(rows.w + of_weight * rows.w_bytes);
  const char* x = static_cast<const char*>(rows.x) + blockIdx.z * rows.head_bytes;
  const RowReader<T> reader{reinterpret_cast<const T*>(x) + source * rows.stride, order, rows.k};
  const int64_t groups = groups_of(rows.k), out = int64_t(blockIdx.z) * rows.rows + row;
  const int64_t begin = int64_t(blockIdx.y) * kRemainderSpan;
  const int64_t end = begin + kRemainderSpan < groups ? begin + kRemainderSpan : groups;
  for (int64_t g = begin + warp; g < end; g += kWarps) {
    const float largest = quantise_group(reader.at(g), rows.out.codes + (out * groups + g) * kGroup,
                                         rows.out.terms + out * groups + g);
    if (lane == 0) largest_of[g - begin] = largest;
  }
  __syncthreads();
  if (warp != 0) return;
  int64_t first = begin;
  float most = 0.0f;
  for (int64_t g = begin; g < end; g++) {
    if (!(largest_of[g - begin] > most)) continue;
    most = largest_of[g - begin];
    first = g;
  }
  float left = 0.0f;
  if (most > 0.0f) {
    const float x_of_lane = reader.at(first);
    left = fmaf(-rintf(x_of_lane * (127.0f / most)), most / 127.0f, x_of_lane);
  }
  Remainder* remainder = rows.out.remainders + out * int64_t(gridDim.y) + blockIdx.y;
  quantise_group(left, remainder->codes, &remainder->terms);
  if (lane == 0) remainder->group = first;
}

}  // namespace

CodeRows quantise_rows(const ProductTask& task, const Pairs& pairs, Workspace& workspace) {
  const int64_t rows = task.rows * task.heads.num, groups = ceil_div(task.k, kGroup);
  const int64_t spans = num_remainders(task.k);
  const CodeRows out{workspace.take<int8_t>(rows * groups * kGroup), workspace.take<GroupTerms>(rows * groups),
                     workspace.take<Remainder>(rows * spans)};
  const bool has_experts = pairs.ids != nullptr;
  const int64_t w_bytes = has_experts ? task.w.shape[task.w.rank - 1] : task.heads.w_bytes;
  const Rows given{task.x,         task.row_of_x(), task.heads.x_bytes,
                   int(task.k),    int(task.rows),  task.count,
                   static_cast<const uint8_t*>(task.w.data), w_bytes, pairs, out};
  const dim3 grid{unsigned(task.rows), unsigned(spans), unsigned(task.heads.num)};
  if (task.x_type == DType::kF32) {
    launch(quantise_kernel<float>, grid, kWarps * kWarp, 0, given);
  } else {
    launch(quantise_kernel<bf16>, grid, kWarps * kWarp, 0, given);
  }
  return out;
}

}  // namespace cadenza::cuda
