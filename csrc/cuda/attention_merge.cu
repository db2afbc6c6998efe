// Merges the parts of rows with few queries: a warp for each head of each token.
#include "cuda/attention.h"

namespace cadenza::cuda {

namespace {

constexpr int kMergeWarps = 4;

// The row of a token of a step.
__device__ __forceinline__ int row_of_token(const Attention& a, int token) {
  return row_of(a.query_starts, a.rows, token);
}

// Each lane has two neighbouring elements of every 64.
__global__ void __launch_bounds__(kMergeWarps* kWarp) merge_kernel(Attention a, int tokens) {
  const int64_t index = int64_t(blockIdx.x) * kMergeWarps + int(threadIdx.x) / kWarp;
  const int token = int(index / a.heads), head = int(index % a.heads);
  if (token >= tokens || token >= a.query_starts[a.rows]) return;
  const int row = row_of_token(a, token);
  const RowContext c = context_of(a, row);
  if (a.plan.many[row + 1] > a.plan.many[row]) return;
  const int stride = a.partial_stride();
  const int64_t step = int64_t(c.queries) * a.heads * stride;
  const float* first = a.partials + ((int64_t(a.plan.slots[row]) + token - c.first) * a.heads + head) * stride;
  const int64_t at = (int64_t(token) * a.heads + head) * a.value_size;
  for (int column = int(threadIdx.x) % kWarp * 2; column < a.value_size; column += 2 * kWarp) {
    float maximum = -INFINITY, sum = 0.0f;
    float2 numerator = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int part = 0; part < c.num_parts; part++) {
      const float* from = first + part * step;
      const float2 own = *reinterpret_cast<const float2*>(from + column);
      const float2 end = *reinterpret_cast<const float2*>(from + a.value_size);
      const Merge merge(maximum, sum, end.x, end.y);
      maximum = merge.maximum;
      sum = merge.of(sum, end.y);
      numerator.x = merge.of(numerator.x, own.x);
      numerator.y = merge.of(numerator.y, own.y);
    }
    const float inverse = inverse_total(a, maximum, sum, head);
    const bool saw_nothing = sum == 0.0f;
    write_output(a, at + column, saw_nothing ? 0.0f : numerator.x * inverse,
                 saw_nothing ? 0.0f : numerator.y * inverse);
  }
}

}  // namespace

void merge_parts(const Attention& a, int64_t tokens) {
  const dim3 grid{unsigned(ceil_div(tokens * a.heads, kMergeWarps))};
  launch(merge_kernel, grid, kMergeWarps * kWarp, 0, a, int(tokens));
}

}  // namespace cadenza::cuda
