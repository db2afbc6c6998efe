// The loops that measure the roofline: memory reads, and multiply-adds in registers.
#pragma once

#include "core/kernel_table.h"
#include "core/roofline.h"
#include "kernels/math.h"
#include "kernels/micro.h"

namespace cadenza::CADENZA_ISA {

// Prevents the compiler from removing the computation of `value`.
template <class V>
inline void observe(const V& value) {
  asm volatile("" : : "r"(&value) : "memory");
}

inline void read_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const ReadTask*>(context);
  constexpr int kChains = 4;
  constexpr int64_t kStride = kChains * kLanes * int64_t(sizeof(float));
  const char* data = static_cast<const char*>(task.data) + begin * kReadBlock;
  VecI mixed[kChains] = {set1_i(0), set1_i(0), set1_i(0), set1_i(0)};
  for (int64_t at = 0; at < (end - begin) * kReadBlock; at += kStride) {
    const float* line = reinterpret_cast<const float*>(data + at);
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) {
      __builtin_prefetch(data + at + 4096 + i * 64, 0, 3);
      mixed[i] = xor_i(mixed[i], as_int(load(line + i * kLanes)));
    }
  }
  observe(mixed);
}

// The register tile of the matrix products without its loads: their upper bound.
template <class T>
void multiply_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const MultiplyTask*>(context);
  const T* seeds = static_cast<const T*>(task.seeds);
  Vec acc[kMaxRows][kTileVecs];  // in registers: each loop over it is unrolled, and its address unused
#pragma GCC unroll 16
  for (int i = 0; i < kMaxRows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kTileVecs; j++) acc[i][j] = set1(float(1 + i * kTileVecs + j));
  auto weight = Elem<T>::template weight<0>(seeds);
  auto operand = Elem<T>::broadcast(reinterpret_cast<const Input<T>*>(seeds + 2));
  for (int64_t step = 0; step < (end - begin) * task.steps; step++) {
#pragma GCC unroll 16
    for (int i = 0; i < kMaxRows; i++)
#pragma GCC unroll 4
      for (int j = 0; j < kTileVecs; j++) {
        acc[i][j] = Elem<T>::multiply_add(acc[i][j], weight, operand);
      }
  }
  Vec sum = zero();
#pragma GCC unroll 16
  for (int i = 0; i < kMaxRows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kTileVecs; j++) sum = add(sum, acc[i][j]);
  observe(sum);
  constexpr int64_t kLaneOperations = 2 * kStep<T> / Elem<T>::kProducts;
  constexpr int64_t kPerStep = kLaneOperations * kLanes * kMaxRows * kTileVecs;
  __atomic_fetch_add(task.operations, (end - begin) * task.steps * kPerStep, __ATOMIC_RELAXED);
}

}  // namespace cadenza::CADENZA_ISA
