// A warp for each row. Scores and weights of all experts are in shared memory; the best are found one
// after another, of equal ones the lowest id.
#include "cuda/routing.h"

#include "cuda/math.h"

namespace cadenza::cuda {

namespace {

constexpr int kWarps = 4;

struct Best {
  float score;
  int id;
};

__device__ __forceinline__ bool is_better(const Best& a, const Best& b) {
  if (a.id < 0 || b.id < 0) return b.id < 0 && a.id >= 0;
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// The best of `count` scores that the lanes have not taken yet: lane l has those of ids l, l + 32, ...
__device__ __forceinline__ int take_best(const float* scores, int count, uint32_t& taken) {
  const int lane = int(threadIdx.x) % kWarp;
  Best best{0.0f, -1};
  for (int id = lane, i = 0; id < count; id += kWarp, i++) {
    const Best own{scores[id], id};
    if ((taken >> i & 1) == 0 && is_better(own, best)) best = own;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const Best other{warp_shuffle_xor(best.score, mask), warp_shuffle_xor(best.id, mask)};
    if (is_better(other, best)) best = other;
  }
  if (best.id % kWarp == lane) taken |= 1u << best.id / kWarp;
  return best.id;
}

// The largest logit, or NaN if any is NaN.
__device__ __forceinline__ float largest_of(const float* logits, int experts) {
  float largest = logits[0];
  bool is_number = true;
  for (int id = int(threadIdx.x) % kWarp; id < experts; id += kWarp) {
    is_number = is_number && logits[id] == logits[id];
    if (logits[id] > largest) largest = logits[id];
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float other = warp_shuffle_xor(largest, mask);
    if (other > largest) largest = other;
    is_number = warp_shuffle_xor(int(is_number), mask) != 0 && is_number;
  }
  return is_number ? largest : as_bits<float>(0x7fc00000u);
}

// Exponentials of the logits less the largest; returns their sum: sixteen sums of every sixteenth, added
// in one fixed tree.
__device__ __forceinline__ float exponentials(const float* logits, int experts, float largest, float* out) {
  const int lane = int(threadIdx.x) % kWarp;
  float sum = 0.0f;
  for (int id = lane; lane < kLanes && id < experts; id += kLanes) {
    out[id] = exp_of(logits[id] - largest);
    sum += out[id];
  }
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += warp_shuffle_xor(sum, mask);
  return warp_shuffle(sum, 0);
}

// Leaves out the experts of groups whose two best have not the largest sums.
__device__ __forceinline__ void keep_best_groups(const BiasedChoice& choice, int experts, float* scores,
                                                 float* of_groups) {
  const int lane = int(threadIdx.x) % kWarp, count = int(choice.num_groups), size = experts / count;
  const float lowest = as_bits<float>(0xff800000u);
  for (int group = lane; group < count; group += kWarp) {
    float first = lowest, second = lowest;
    for (int i = group * size; i < (group + 1) * size; i++) {
      second = scores[i] > first ? first : scores[i] > second ? scores[i] : second;
      if (scores[i] > first) first = scores[i];
    }
    of_groups[group] = size == 1 ? first : first + second;
  }
  warp_barrier();
  uint32_t kept = 0;
  for (int i = 0; i < choice.num_chosen_groups; i++) take_best(of_groups, count, kept);
  for (int group = lane, i = 0; group < count; group += kWarp, i++) {
    if ((kept >> i & 1) != 0) continue;
    for (int id = group * size; id < (group + 1) * size; id++) scores[id] = lowest;
  }
  warp_barrier();
}

// Each lane computes the sum over the chosen experts, in the order of the slots.
__device__ __forceinline__ void write_weights(const Routing& routing, const float* values, float total,
                                              const int32_t* ids, float* weights) {
  if (routing.over_chosen) {
    total = 0.0f;
    for (int s = 0; s < routing.chosen; s++) total += values[ids[s]];
    total += routing.least_sum;
  }
  for (int s = int(threadIdx.x) % kWarp; s < routing.chosen; s += kWarp) {
    float weight = values[ids[s]] / total * routing.scale;
    if (routing.factors != nullptr) weight *= routing.factors[ids[s]];
    weights[s] = weight;
  }
}

// `memory` has a row's scores, values and chosen ids, and scores of groups.
__device__ void route_row(const Routing& routing, int64_t row, float* memory) {
  const int lane = int(threadIdx.x) % kWarp, experts = routing.experts;
  const float* logits = routing.logits + row * experts;
  float *values = memory, *scores = memory + experts, *of_groups = memory + 2 * experts;
  auto* ids = reinterpret_cast<int32_t*>(memory + 3 * experts);
  const float largest = largest_of(logits, experts);
  if (!(largest - largest == 0.0f)) {  // not finite: the softmax is undefined
    for (int s = lane; s < routing.chosen; s += kWarp) {
      routing.ids[row * routing.chosen + s] = s;
      routing.weights[row * routing.chosen + s] = as_bits<float>(0x7fc00000u);
    }
    return;
  }
  float total = 1.0f;
  if (routing.sigmoid) {
    for (int id = lane; id < experts; id += kWarp) values[id] = sigmoid(logits[id]);
  } else {
    total = exponentials(logits, experts, largest, values);
  }
  warp_barrier();
  const float* bias = routing.choice.bias;
  for (int id = lane; id < experts; id += kWarp) {
    scores[id] = bias == nullptr ? logits[id] : values[id] + bias[id];
  }
  warp_barrier();
  if (bias != nullptr && routing.choice.num_groups > 1) {
    keep_best_groups(routing.choice, experts, scores, of_groups);
  }
  uint32_t taken = 0;
  for (int s = 0; s < routing.chosen; s++) {
    const int id = take_best(scores, experts, taken);
    if (lane == 0) ids[s] = routing.ids[row * routing.chosen + s] = id;
  }
  warp_barrier();
  write_weights(routing, values, total, ids, routing.weights + row * routing.chosen);
}

__global__ void __launch_bounds__(kWarps* kWarp) route_kernel(Routing routing) {
  const int warp = int(threadIdx.x) / kWarp;
  const int64_t row = int64_t(blockIdx.x) * kWarps + warp;
  if (row >= routing.rows || row >= *routing.count) return;
  route_row(routing, row, shared_memory<float>() + warp * 4 * routing.experts);
}

}  // namespace

void route(const Routing& routing) {
  const size_t shared_bytes = size_t(kWarps) * 4 * routing.experts * sizeof(float);
  launch(route_kernel, dim3{unsigned(ceil_div(routing.rows, kWarps))}, kWarps * kWarp, shared_bytes, routing);
}

}  // namespace cadenza::cuda
