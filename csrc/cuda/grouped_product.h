// The product of each pair of a row and one of its chosen experts.
#pragma once

#include "cuda/groups.h"
#include "cuda/product.h"

namespace cadenza::cuda {

// x is [rows, chosen / pairs_of_row, K], out [rows, chosen, columns of the product], a bias [X, N]. The
// weight's first axis are the experts. Launches the kernels of its format, as product().
void product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                        Workspace& workspace);

// Of the formats, as product_of_experts() calls them.
void float_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                              Workspace& workspace);
void code_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                             Workspace& workspace);
void float8_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                               Workspace& workspace);

}  // namespace cadenza::cuda
