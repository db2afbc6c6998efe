// bf16 products of many rows by cublasLt, with algorithms that do not split K.
//
// Which of its algorithms and our kernels computes a product is decided once, by the proof at load
// (proof.h): the fastest of those with equal bits. A product that was not proven is computed by the
// first of our kernels.
#pragma once

#include "cuda/cublaslt_plan.h"
#include "cuda/product.h"

namespace cadenza::cuda {

// Rows from which cublasLt is tried. Fewer are bound by reading weights, as our kernels do.
constexpr int64_t kLeastSharedRows = 16;

// What computes a product: one of our kernels, by its number, or cublasLt.
struct ProductKernel {
  bool is_shared = false;
  int own = 0;
};

// What the products of this thread are computed by, whatever was chosen: for the proof; or null.
inline thread_local const ProductKernel* forced_kernel = nullptr;

// Whether a product has as many rows and such a layout that cublasLt may compute it.
bool can_be_shared(const ProductTask& task);

// Computes it by what was chosen. Takes the same from the workspace, whichever that is.
void bf16_product(const ProductTask& task, Workspace& workspace);

// For the proof.
SharedAlgorithm shared_algorithm(const ProductTask& task);
void choose(const ProductTask& task, const ProductKernel& kernel);

// All algorithms are found and chosen anew.
void forget_algorithms();

}  // namespace cadenza::cuda
