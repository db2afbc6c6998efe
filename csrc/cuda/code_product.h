// Products with weights of codes whose rows are grouped by expert.
#pragma once

#include "cuda/groups.h"
#include "cuda/product.h"

namespace cadenza::cuda {

// The product of each pair's row of x, [rows, chosen / pairs_of_row, K], with its expert's weight; row
// `pair` of out is the pair's. task.rows are those of x; a bias is [X, columns of the product].
void code_product_of_experts(const ProductTask& task, const ChosenExperts& chosen, int64_t pairs_of_row,
                             Workspace& workspace);

}  // namespace cadenza::cuda
