// A block counts the pairs of each expert, places the experts one behind the other, and then their
// pairs. Counters are integers, and the order of an expert's pairs changes no result.
#include "cuda/groups.h"

#include <algorithm>

namespace cadenza::cuda {

namespace {

constexpr int kThreads = 512;

struct Grouping {
  const int32_t* ids;
  int pairs, chosen, experts, height;
  const int32_t* count;
  int32_t* sorted;
  RowTile* tiles;
  int32_t* num_tiles;
};

// The ends of an expert's pairs and tiles among those of all.
struct Ends {
  int pairs, tiles;
};

// Makes [experts] numbers the sums of those up to and with each, in place.
__device__ void add_up(Ends* ends, int experts) {
  for (int distance = 1; distance < experts; distance *= 2) {
    for (int begin = (experts - 1) / kThreads * kThreads; begin >= 0; begin -= kThreads) {
      const int at = begin + int(threadIdx.x);
      Ends before{0, 0};
      if (at < experts && at >= distance) before = ends[at - distance];
      __syncthreads();
      if (at < experts) {
        ends[at].pairs += before.pairs;
        ends[at].tiles += before.tiles;
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kThreads) group_kernel(Grouping grouping) {
  int* counts = shared_memory<int>();
  Ends* ends = reinterpret_cast<Ends*>(counts + grouping.experts);
  const int first = int(threadIdx.x), height = grouping.height;
  const int pairs = min(grouping.pairs, *grouping.count * grouping.chosen);
  for (int i = first; i < grouping.experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  for (int pair = first; pair < pairs; pair += kThreads) {
    const int expert = grouping.ids[pair];
    if (expert >= 0 && expert < grouping.experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int i = first; i < grouping.experts; i += kThreads) {
    ends[i] = {counts[i], (counts[i] + height - 1) / height};
  }
  __syncthreads();
  add_up(ends, grouping.experts);
  if (first == 0) *grouping.num_tiles = ends[grouping.experts - 1].tiles;
  for (int i = first; i < grouping.experts; i += kThreads) {
    const int rows = counts[i], begin = ends[i].pairs - rows;
    RowTile* tiles = grouping.tiles + ends[i].tiles - (rows + height - 1) / height;
    for (int done = 0; done < rows; done += height) {
      *tiles++ = {i, begin + done, min(height, rows - done)};
    }
    counts[i] = begin;
  }
  __syncthreads();
  for (int pair = first; pair < pairs; pair += kThreads) {
    const int expert = grouping.ids[pair];
    if (expert < 0 || expert >= grouping.experts) continue;
    grouping.sorted[atomicAdd(&counts[expert], 1)] = pair;
  }
}

}  // namespace

GroupedRows group_rows(const ChosenExperts& chosen, int height, Workspace& workspace) {
  const int64_t pairs = chosen.num_pairs();
  const int64_t most_tiles = std::min(pairs, chosen.experts + pairs / height);
  auto* sorted = workspace.take<int32_t>(pairs);
  auto* tiles = workspace.take<RowTile>(most_tiles);
  auto* num_tiles = workspace.take<int32_t>(1);
  const size_t shared_bytes = size_t(chosen.experts) * (sizeof(int) + sizeof(Ends));
  launch(group_kernel, dim3{1}, kThreads, shared_bytes,
         Grouping{chosen.ids, int(pairs), int(chosen.chosen), int(chosen.experts), height, chosen.count, sorted,
                  tiles, num_tiles});
  return {sorted, tiles, num_tiles, most_tiles, height};
}

}  // namespace cadenza::cuda
