// What we use of cublasLt's C interface, which is loaded at run time: no header of its is needed to
// compile. Names and values are those of cublasLt.h, 12 and 13; tests/cublaslt_abi.cpp compares them
// where that header is found.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cadenza::cuda::lt {

using Status = int;  // 0: success
using Handle = void*;
using Descriptor = void*;  // of a product, a matrix or preferences

constexpr int kComputeF32 = 68, kComputeI32 = 72;
constexpr int kF32 = 0, kI8 = 3, kI32 = 10, kBf16 = 14;
constexpr int kNotTransposed = 0, kTransposed = 1;

enum ProductAttribute : int { kTransposesA = 3, kTransposesB = 4 };
enum PreferenceAttribute : int {
  kMostWorkspace = 1,
  kReductionSchemes = 3,
  kAlignmentOfA = 5,
  kAlignmentOfB = 6,
  kAlignmentOfC = 7,
  kAlignmentOfD = 8
};
enum AlgorithmAttribute : int { kId = 0, kTile = 1, kSplits = 2, kReductionScheme = 3, kStages = 6 };
enum ReductionScheme : uint32_t { kNone = 0, kComputeType = 2, kAnyScheme = 7 };

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

// The library's functions; `stream` is a CUDA stream.
struct Functions {
  size_t (*version)();
  Status (*create)(Handle* handle);
  Status (*create_product)(Descriptor* product, int compute_type, int scale_type);
  Status (*set_product)(Descriptor product, int attribute, const void* value, size_t bytes);
  Status (*create_matrix)(Descriptor* matrix, int type, uint64_t rows, uint64_t columns, int64_t stride);
  Status (*create_preference)(Descriptor* preference);
  Status (*set_preference)(Descriptor preference, int attribute, const void* value, size_t bytes);
  Status (*find)(Handle handle, Descriptor product, Descriptor a, Descriptor b, Descriptor c,
                 Descriptor d, Descriptor preference, int most, Heuristic* found, int* num_found);
  Status (*check)(Handle handle, Descriptor product, Descriptor a, Descriptor b, Descriptor c,
                  Descriptor d, const Algorithm* algorithm, Heuristic* result);
  Status (*get_algorithm)(const Algorithm* algorithm, int attribute, void* value, size_t bytes,
                          size_t* written);
  Status (*set_algorithm)(Algorithm* algorithm, int attribute, const void* value, size_t bytes);
  Status (*multiply)(Handle handle, Descriptor product, const void* alpha, const void* a,
                     Descriptor a_matrix, const void* b, Descriptor b_matrix, const void* beta,
                     const void* c, Descriptor c_matrix, void* d, Descriptor d_matrix,
                     const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                     void* stream);
};

}  // namespace cadenza::cuda::lt
