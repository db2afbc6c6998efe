// Compares cuda/cublaslt_abi.h with cublasLt's own header, where there is one.
#include "cuda/cublaslt_abi.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

#include <type_traits>

namespace cadenza::cuda::lt {

static_assert(kComputeF32 == CUBLAS_COMPUTE_32F && kComputeI32 == CUBLAS_COMPUTE_32I);
static_assert(kF32 == CUDA_R_32F && kI8 == CUDA_R_8I && kI32 == CUDA_R_32I && kBf16 == CUDA_R_16BF);
static_assert(kNotTransposed == CUBLAS_OP_N && kTransposed == CUBLAS_OP_T);
static_assert(kTransposesA == int(CUBLASLT_MATMUL_DESC_TRANSA) &&
              kTransposesB == int(CUBLASLT_MATMUL_DESC_TRANSB));
static_assert(kMostWorkspace == int(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) &&
              kReductionSchemes == int(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK));
static_assert(kAlignmentOfA == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) &&
              kAlignmentOfB == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) &&
              kAlignmentOfC == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES) &&
              kAlignmentOfD == int(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES));
static_assert(kId == int(CUBLASLT_ALGO_CONFIG_ID) && kTile == int(CUBLASLT_ALGO_CONFIG_TILE_ID) &&
              kSplits == int(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) &&
              kReductionScheme == int(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) &&
              kStages == int(CUBLASLT_ALGO_CONFIG_STAGES_ID));
static_assert(kNone == unsigned(CUBLASLT_REDUCTION_SCHEME_NONE) &&
              kComputeType == unsigned(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) &&
              kAnyScheme == unsigned(CUBLASLT_REDUCTION_SCHEME_MASK));
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t) &&
              offsetof(Heuristic, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(Heuristic, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));

// Pointers to the types of the header are passed as pointers to void, enumerations as int.
template <class Ours, class Theirs>
struct Fits;
template <class Ours, class... O, class Theirs, class... T>
struct Fits<Ours (*)(O...), Theirs (*)(T...)> {
  template <class A, class B>
  static constexpr bool same = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
  static constexpr bool value = same<Ours, Theirs> && (same<O, T> && ...);
};

static_assert(Fits<decltype(Functions::version), decltype(&cublasLtGetVersion)>::value);
static_assert(Fits<decltype(Functions::create), decltype(&cublasLtCreate)>::value);
static_assert(Fits<decltype(Functions::create_product), decltype(&cublasLtMatmulDescCreate)>::value);
static_assert(Fits<decltype(Functions::set_product), decltype(&cublasLtMatmulDescSetAttribute)>::value);
static_assert(Fits<decltype(Functions::create_matrix), decltype(&cublasLtMatrixLayoutCreate)>::value);
static_assert(Fits<decltype(Functions::create_preference), decltype(&cublasLtMatmulPreferenceCreate)>::value);
static_assert(Fits<decltype(Functions::set_preference), decltype(&cublasLtMatmulPreferenceSetAttribute)>::value);
static_assert(Fits<decltype(Functions::find), decltype(&cublasLtMatmulAlgoGetHeuristic)>::value);
static_assert(Fits<decltype(Functions::check), decltype(&cublasLtMatmulAlgoCheck)>::value);
static_assert(Fits<decltype(Functions::get_algorithm), decltype(&cublasLtMatmulAlgoConfigGetAttribute)>::value);
static_assert(Fits<decltype(Functions::set_algorithm), decltype(&cublasLtMatmulAlgoConfigSetAttribute)>::value);
static_assert(Fits<decltype(Functions::multiply), decltype(&cublasLtMatmul)>::value);

}  // namespace cadenza::cuda::lt

#endif
