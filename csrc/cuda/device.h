// What kernels use of a GPU. On the host, for tests, an emulation of threads and blocks takes its
// place (emulated.h), with the same names.
//
// Kernels use these names, threadIdx and its like, __syncthreads, fmaf, and IEEE operations; no
// contraction is left to the compiler (-fmad=false, -ffp-contract=off). Warps have 32 lanes; a
// function that is named warp_… is called by all lanes of a warp together.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/types.h"

#ifdef CADENZA_EMULATED_GPU
#include "cuda/emulated.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace cadenza::cuda {

using Stream = cudaStream_t;

// The dynamic shared memory of the block; its content is undefined when the block starts.
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(128) unsigned char cadenza_shared[];
  return reinterpret_cast<T*>(cadenza_shared);
}

template <class To, class From>
__device__ __forceinline__ To as_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}

__device__ __forceinline__ bf16 to_bf16(float value) {  // to nearest even
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}

template <class T>
__device__ __forceinline__ T warp_shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
__device__ __forceinline__ T warp_shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// d += a b with a [16, 16] and b [16, 8] of bf16. Of lane l = 4 g + t, a[0] has row g and columns
// 2 t, 2 t + 1; a[1] row g + 8; a[2] and a[3] columns 8 further; b[0] has rows 2 t, 2 t + 1 of
// column g, b[1] rows 8 further; d[0], d[1] are row g, columns 2 t, 2 t + 1, d[2], d[3] row g + 8.
__device__ __forceinline__ void warp_mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b with a [16, 32] and b [32, 8] of int8, exact. Of lane l = 4 g + t, a[0] has row g and
// columns 4 t to 4 t + 3; a[1] row g + 8; a[2] and a[3] columns 16 further; b[0] has rows 4 t to
// 4 t + 3 of column g, b[1] rows 16 further; d as of warp_mma_bf16.
__device__ __forceinline__ void warp_mma_int8(int32_t (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d = start + a b, in all elements; as warp_mma_int8 otherwise.
__device__ __forceinline__ void warp_mma_int8_from(int32_t start, int32_t (&d)[4], const uint32_t (&a)[4],
                                                   const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
}

// d += a b with a [16, 16] of uint8 and b [16, 8] of int8, exact. Of lane l = 4 g + t, a[0] has row g
// and columns 4 t to 4 t + 3, a[1] row g + 8; b has rows 4 t to 4 t + 3 of column g; d as of
// warp_mma_bf16.
__device__ __forceinline__ void warp_mma_uint8(int32_t (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Four matrices [8, 8] of 16-bit elements from shared memory: lane l gives the address of row l % 8
// of matrix l / 8, 16 bytes aligned; of lane l = 4 g + t, r[i] has row g, columns 2 t, 2 t + 1 of
// matrix i.
__device__ __forceinline__ void warp_load_matrices(uint32_t (&r)[4], const void* row) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// As warp_load_matrices, each matrix transposed: r[i] has rows 2 t, 2 t + 1 of column g.
__device__ __forceinline__ void warp_load_transposed(uint32_t (&r)[4], const void* row) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// 16 bytes from global to shared memory, both aligned; zeros if not `holds`, and then `from` is not
// read. They are there for this thread after copy_wait, for others after a barrier behind it.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool holds = true) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
  const int bytes = holds ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(at), "l"(from), "r"(bytes)
               : "memory");
}
// Ends a group of copies.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the newest `Left` groups are still on their way.
template <int Left>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// What other blocks wrote before their memory_fence, which this one knows of by an atomic.
template <class T>
__device__ __forceinline__ T load_fresh(const T* at) {
  return __ldcg(at);
}
__device__ __forceinline__ void memory_fence() { __threadfence(); }

// Of kernels that are started by launch_early(), on cards that can: the next kernel on the stream may
// take the place that is left beside this one, which it waits for in await_previous().
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits for the kernels before this one, and sees what they wrote. Every block calls it, also one that
// computes nothing, since a kernel behind this one waits for this one alone. Before it a block reads
// only what no kernel of a program writes: weights.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Both, of a kernel that has nothing to do before.
__device__ __forceinline__ void take_turn() {
  start_next();
  await_previous();
}

// Reads global memory that the kernel does not write.
template <class T>
__device__ __forceinline__ T load_constant(const T* at) {
  return __ldg(at);
}

}  // namespace cadenza::cuda
#endif

namespace cadenza::cuda {

constexpr int kWarp = 32;

__device__ __forceinline__ float to_float(bf16 value) {
  return as_bits<float>(uint32_t(value.bits) << 16);
}
__device__ __forceinline__ float to_float(float value) { return value; }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
  return to_bf16(value);
}
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

// The sum over the lanes of a warp, in one fixed tree; every lane gets it.
__device__ __forceinline__ float warp_sum(float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += warp_shuffle_xor(value, mask);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = fmaxf(value, warp_shuffle_xor(value, mask));
  return value;
}

// The sum over the threads of a block of whole warps, in one fixed tree; every thread gets it.
// `partials` is shared memory for one float a warp, which nothing else uses before the next barrier.
__device__ __forceinline__ float block_sum(float value, float* partials) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) partials[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < int(blockDim.x) / kWarp; warp++) total += partials[warp];
  __syncthreads();
  return total;
}

}  // namespace cadenza::cuda
