// Rows of activations as integer codes, by the arithmetic of core/quantised.h, for products with weights
// of codes.
#pragma once

#include "core/quantised.h"
#include "cuda/product.h"

namespace cadenza::cuda {

// In the workspace: rows of all heads, one head behind the other.
struct CodeRows {
  int8_t* codes;          // [rows, groups, 32]
  GroupTerms* terms;      // [rows, groups]
  Remainder* remainders;  // [rows, spans of groups]
};

// The pairs of a row and one of its chosen experts, whose weight may have an order of its inputs.
struct Pairs {
  const int32_t* ids = nullptr;  // [rows]: the expert of each; null: all rows have one weight
  int64_t num_experts = 0;
  int64_t chosen = 1;   // pairs of a row of the step
  int64_t per_row = 1;  // pairs that share a row of x
};

// Quantises the rows of a task's x. With pairs `rows` is their number; without an order of the inputs
// only the first of the pairs of each row of x is quantised (row_of_pair).
CodeRows quantise_rows(const ProductTask& task, const Pairs& pairs, Workspace& workspace);

}  // namespace cadenza::cuda
