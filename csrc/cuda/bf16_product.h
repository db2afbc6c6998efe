// The kernels of bf16 products that are our own: for few rows, and for any number where cublasLt is
// absent, slower or of other bits.
#pragma once

#include "cuda/product.h"

namespace cadenza::cuda {

// Kernels that differ in their tiles, and in no bit; the proof at load takes the fastest. The first is
// what counting bytes and blocks suggests.
int num_own_kernels(const ProductTask& task);
const char* name_of_own_kernel(const ProductTask& task, int kernel);
void own_bf16_product(const ProductTask& task, int kernel);

}  // namespace cadenza::cuda
