// Threads, blocks and warps of a GPU on the host, for tests: each thread of a block is a coroutine,
// which runs until it waits for others. Included by device.h, whose names it defines.
//
// The model is strict where a GPU is: a thread that waits at a barrier that others never reach, a
// lane that is missing in a call of its whole warp, and a wait for copies that is left out are
// found. Blocks run one after another. CADENZA_GPU_ORDER=backward runs threads from the last to the
// first, so that a missing barrier shows in the results.
#pragma once

#include <cmath>
#include <functional>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __constant__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// Those of the thread that runs.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
  return sum;
}
// Byte i of the result is the one of the eight of `low` and `high` that nibble i of the selector names.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
void __syncthreads();
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}

namespace cadenza::cuda {

using Stream = void*;

// A rule of the GPU's that a kernel broke.
struct KernelFault : std::logic_error {
  using std::logic_error::logic_error;
};

namespace emulated {

constexpr int kLaneBytes = 32;

unsigned char* dynamic_shared();
// Waits until all lanes of the warp are here.
void wait_for_warp();
// What each lane of the warp has passed on: [32, kLaneBytes].
unsigned char* warp_exchange();
int own_lane();
void queue_copy(void* to, const void* from, bool holds);
void close_copies();
void finish_copies(int left);
// Runs a kernel's body for each thread of each block.
void run_grid(dim3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body);

// All lanes pass on a value; returns the warp's values, valid until release().
template <class T>
const unsigned char* exchange(const T& value) {
  static_assert(sizeof(T) <= kLaneBytes);
  std::memcpy(warp_exchange() + own_lane() * kLaneBytes, &value, sizeof(T));
  wait_for_warp();
  return warp_exchange();
}
inline void release() { wait_for_warp(); }
template <class T>
T value_of(const unsigned char* values, int lane) {
  T value;
  std::memcpy(&value, values + lane * kLaneBytes, sizeof(T));
  return value;
}

}  // namespace emulated

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulated::dynamic_shared());
}

template <class To, class From>
To as_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof(to));
  return to;
}

inline bf16 to_bf16(float value) {
  const uint32_t raw = as_bits<uint32_t>(value);
  if (value != value) return {0x7fff};  // as the GPU's conversion
  return {uint16_t((raw + 0x7fff + (raw >> 16 & 1)) >> 16)};
}

template <class T>
T warp_shuffle(T value, int lane) {
  const T found = emulated::value_of<T>(emulated::exchange(value), lane % 32);
  emulated::release();
  return found;
}
template <class T>
T warp_shuffle_xor(T value, int mask) {
  return warp_shuffle(value, emulated::own_lane() ^ mask);
}
inline void warp_barrier() { emulated::wait_for_warp(); }

void warp_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void warp_mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
inline void warp_mma_int8_from(int32_t start, int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  for (int32_t& each : d) each = start;
  warp_mma_int8(d, a, b);
}
void warp_mma_uint8(int32_t (&d)[4], const uint32_t (&a)[2], uint32_t b);
void warp_load_matrices(uint32_t (&r)[4], const void* row);
void warp_load_transposed(uint32_t (&r)[4], const void* row);

inline void copy_async(void* to, const void* from, bool holds = true) {
  emulated::queue_copy(to, from, holds);
}
inline void copy_commit() { emulated::close_copies(); }
template <int Left>
void copy_wait() {
  emulated::finish_copies(Left);
}

template <class T>
T load_fresh(const T* at) {
  return *at;
}
inline void memory_fence() {}
inline void start_next() {}
inline void await_previous() {}
inline void take_turn() {}
template <class T>
T load_constant(const T* at) {
  return *at;
}

}  // namespace cadenza::cuda
