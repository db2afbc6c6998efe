// The choice of experts from their logits.
#pragma once

#include "core/tasks.h"
#include "cuda/launch.h"

namespace cadenza::cuda {

struct Routing {
  const float* logits;  // [rows, X]
  const int32_t* count;
  int64_t rows;
  int experts, chosen;
  bool over_chosen, sigmoid;
  BiasedChoice choice;
  float scale, least_sum;
  const float* factors;  // [X], or null
  int32_t* ids;          // [rows, C]
  float* weights;        // [rows, C]
};

constexpr int kMostExperts = 1024;

void route(const Routing& routing);

}  // namespace cadenza::cuda
