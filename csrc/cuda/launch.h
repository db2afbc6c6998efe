// What an operation's body needs: the stream and the workspace of the program that runs, and the
// launch of kernels.
//
// A program is run in two ways. Measured, its arrays have shapes but no memory: bodies ask for
// their workspace, and launches are left out, so the largest demand is known before XLA allocates.
// Run, the workspace is a part of the program's scratch memory. Operations follow one another on
// the stream, so each may use the workspace from its beginning.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/device.h"

namespace cadenza::cuda {

struct Context {
  Stream stream = nullptr;
  bool is_measured = false;
  char* workspace = nullptr;
  size_t workspace_bytes = 0;
  size_t needed_bytes = 0;
  // No step has more rows of anything than tokens: rows of longer arrays are not computed.
  int64_t row_bound = 0;
};

// Of the program that this thread runs.
inline thread_local Context context;

// The rows that an operation over arrays of `padded` rows has to compute at most.
inline int64_t rows_to_compute(int64_t padded) {
  return context.row_bound > 0 && context.row_bound < padded ? context.row_bound : padded;
}

// The memory of one operation. take() calls must be the same, measured and run.
class Workspace {
 public:
  template <class T>
  T* take(int64_t count) {
    const size_t at = taken_;
    taken_ += (size_t(count) * sizeof(T) + 255) / 256 * 256;
    if (context.is_measured) {
      if (taken_ > context.needed_bytes) context.needed_bytes = taken_;
      return nullptr;
    }
    if (taken_ > context.workspace_bytes) throw std::logic_error("the workspace is too small");
    return reinterpret_cast<T*>(context.workspace + at);
  }

 private:
  size_t taken_ = 0;
};

#ifdef CADENZA_EMULATED_GPU

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, A... arguments) {
  if (context.is_measured || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  emulated::run_grid(grid, threads, shared_bytes, [&] { kernel(P(arguments)...); });
}

template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, A... arguments) {
  launch(kernel, grid, threads, shared_bytes, arguments...);
}

// The blocks of a kernel that the device holds at a time.
template <class... P>
int resident_blocks(void (*)(P...), unsigned, size_t) {
  return 3;
}

inline void copy_on_device(void* to, const void* from, size_t bytes) {
  if (!context.is_measured) std::memmove(to, from, bytes);
}

#else

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// A block may have 48 KiB of dynamic shared memory unless more is asked for.
constexpr size_t kSharedWithoutAsking = 48 << 10;

template <class... P>
void ask_for_shared(void (*kernel)(P...), size_t shared_bytes) {
  if (shared_bytes <= kSharedWithoutAsking) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
}

template <class... P>
int resident_blocks(void (*kernel)(P...), unsigned threads, size_t shared_bytes) {
  int device = 0, processors = 0, blocks = 0;
  ask_for_shared(kernel, shared_bytes);
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(threads), shared_bytes));
  return processors * (blocks > 0 ? blocks : 1);
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, A... arguments) {
  if (context.is_measured || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  ask_for_shared(kernel, shared_bytes);
  kernel<<<grid, threads, shared_bytes, context.stream>>>(P(arguments)...);
  check(cudaGetLastError());
}

// Whether kernels may begin before the one ahead of them has ended (programmatic dependent launch): only
// if they were compiled for 9.0 or later, as await_previous() is empty in code for earlier cards, which
// later ones can run, too. All kernels of a library are compiled for the same cards.
inline bool can_start_early(const void* kernel) {
  static const bool can = [kernel] {
    cudaFuncAttributes found{};
    check(cudaFuncGetAttributes(&found, kernel));
    return found.ptxVersion >= 90;
  }();
  return can;
}

// As launch(), of a kernel that calls await_previous() in every block.
template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared_bytes, A... arguments) {
  if (context.is_measured || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (!can_start_early(reinterpret_cast<const void*>(kernel))) {
    return launch(kernel, grid, threads, shared_bytes, arguments...);
  }
  ask_for_shared(kernel, shared_bytes);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3{threads};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, P(arguments)...));
}

inline void copy_on_device(void* to, const void* from, size_t bytes) {
  if (context.is_measured) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, context.stream));
}

#endif

}  // namespace cadenza::cuda
