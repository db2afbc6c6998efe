// The proof at load: whether a product gives a row the same bits in every number of rows, on the card
// at hand, and which kernel computes it.
#pragma once

#include <string>
#include <vector>

#include "cuda/product.h"

namespace cadenza::cuda {

struct ProofRequest {
  Weight w;  // on the device
  int64_t n, k;
  bool is_gated;
  DType x_type;
  std::vector<int64_t> rows;  // of every bucket
};

// Multiplies rows in every bucket and compares each with that row alone, by its bits. Where cublasLt
// gives these too and is faster, it computes the bucket from then on; else our kernels do. Returns
// what was found, as JSON; throws std::runtime_error with the shape if our kernels differ.
std::string prove_product(const ProofRequest& request);

}  // namespace cadenza::cuda
