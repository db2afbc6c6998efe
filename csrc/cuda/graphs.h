// Programs as CUDA graphs: what a step launches is recorded once for the arrays that it is given,
// and replayed by one call while these stay where they are. A step's state is donated and its
// weights do not move, so a few addresses recur.
#pragma once

#include <functional>
#include <vector>

#include "cuda/launch.h"

namespace cadenza::cuda {

// A program, by a hash of its words, and where and what its arrays are: the words of programs for other
// numbers of rows can be the same.
struct GraphKey {
  uint64_t program;
  std::vector<int64_t> arrays;
  bool operator<(const GraphKey& other) const {
    return program != other.program ? program < other.program : arrays < other.arrays;
  }
};

// Of a program's words, continued from that of others.
inline uint64_t hash_of(const int64_t* begin, const int64_t* end, uint64_t hash = 0x9e3779b97f4a7c15u) {
  for (; begin != end; begin++) {
    hash = (hash ^ uint64_t(*begin)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

// Runs `body`, which launches on the context's stream and says whether it succeeded; from the second
// time on for an equal key, records what it launches, and replays that. Within a capture of XLA's own,
// and on the emulation, just runs it.
void run_as_graph(GraphKey key, const std::function<bool()>& body);

}  // namespace cadenza::cuda
