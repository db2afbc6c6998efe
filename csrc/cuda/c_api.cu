// C entry points for ctypes: the proof at load, the search for cublasLt, rates and faults. Functions return
// null, or an error that is valid until this thread's next call.
#include "cuda/cublaslt.h"
#include "cuda/device_memory.h"
#include "cuda/fake_cublaslt.h"
#include "cuda/lt_product.h"
#include "cuda/measure.h"
#include "cuda/proof.h"

#ifdef CADENZA_FAULTS
std::atomic<cadenza::Fault> cadenza::injected_fault{cadenza::Fault::kNone};
#endif

namespace {

using namespace cadenza;

template <class Body>
const char* guarded(Body&& body) {
  thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// A weight in the device's memory, and the numbers of rows that it is multiplied by.
struct CadenzaCudaProof {
  const void* weight;
  int64_t format;  // WeightFormat
  const int64_t* shape;
  int64_t rank;
  int64_t n, k;
  int64_t is_gated, x_is_f32;
  const int64_t* rows;
  int64_t num_rows;
};

// `report` is JSON: for each number of rows and type of the result an object with rows, result,
// kernel ("own" or "cublasLt"), tile of the fastest of our kernels, cublaslt_differs, found, own_us,
// cublaslt_us; buckets of too large results are left out. It is valid until this thread's next call. An error names the shape whose bits differ.
const char* cadenza_cuda_prove(const CadenzaCudaProof* proof, const char** report) {
  thread_local std::string found;
  return guarded([&] {
    cuda::ProofRequest request{
        {proof->weight, WeightFormat(proof->format), proof->shape, int(proof->rank)},
        proof->n,
        proof->k,
        proof->is_gated != 0,
        proof->x_is_f32 != 0 ? DType::kF32 : DType::kBf16,
        {proof->rows, proof->rows + proof->num_rows}};
    if (!cuda::fits(request.w, 0, request.n, request.k)) {
      throw std::invalid_argument("the weight's shape does not fit its columns and reduction");
    }
    cuda::use_device_of(proof->weight);
    found = cuda::prove_product(request);
    *report = found.c_str();
  });
}

// A folder with cublasLt, before the first proof: beside the wheels of NVIDIA's libraries.
void cadenza_cuda_search_cublaslt(const char* folder) { cuda::search_cublaslt_in(folder); }

// cublasLt's version, as it counts it; 0 if it was not found.
int64_t cadenza_cuda_cublaslt_version() {
  const cuda::lt::Functions* found = cuda::cublaslt();
  return found == nullptr ? 0 : int64_t(found->version());
}

// Bytes a second that kernels read, and that a copy on the device reads and writes; operations a
// second of tensor cores. Each takes some hundredths of a second and up to a GiB of memory.
const char* cadenza_cuda_measure_read(double* rate) {
  return guarded([&] { *rate = cuda::read_rate(); });
}
const char* cadenza_cuda_measure_copy(double* rate) {
  return guarded([&] { *rate = cuda::copy_rate(); });
}
const char* cadenza_cuda_measure_bf16(double* rate) {
  return guarded([&] { *rate = cuda::bf16_rate(); });
}
const char* cadenza_cuda_measure_int8(double* rate) {
  return guarded([&] { *rate = cuda::int8_rate(); });
}

#ifdef CADENZA_FAULTS
// Injects a fault of core/faults.h into what is launched from now on; 0 removes it.
void cadenza_cuda_inject_fault(int fault) {
  injected_fault = static_cast<Fault>(fault);
  cuda::forget_algorithms();
}
#endif

#ifdef CADENZA_EMULATED_GPU
// How the model of cublasLt behaves (fake_cublaslt.h).
void cadenza_cuda_behave(int behaviour) {
  cuda::behave(cuda::FakeCublasLt(behaviour));
  cuda::forget_algorithms();
}
#endif

}  // extern "C"

#pragma GCC visibility pop
