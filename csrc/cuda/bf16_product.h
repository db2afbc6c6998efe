// The kernels of bf16 products that are our own: for few rows, and for any number where cublasLt is
// absent or its bits differ.
#pragma once

#include "cuda/product.h"

namespace cadenza::cuda {

void own_bf16_product(const ProductTask& task);

}  // namespace cadenza::cuda
