// A vector of sixteen f32 lanes with the same interface on every ISA, so kernels are written once.
//
// A translation unit defines CADENZA_ISA, its namespace, before it includes this file. All inline
// functions are in that namespace; otherwise the linker could merge functions of different ISAs.
#pragma once

#if defined(CADENZA_VEC_AVX512)
#include "vec/avx512.h"
#elif defined(CADENZA_VEC_AVX2)
#include "vec/avx2.h"
#elif defined(CADENZA_VEC_NEON)
#include "vec/neon.h"
#else
#include "vec/scalar.h"
#endif

namespace cadenza::CADENZA_ISA {

// How elements of a type are loaded, multiplied and stored.
template <class T>
struct Elem;

template <>
struct Elem<bf16> {
  using Weight = Weight16;
  using Operand = Operand16;
  static Weight weight(const bf16* p) { return load_weight(p); }
  static Weight weight_masked(const bf16* p, bool keep_first, bool keep_second) {
    return load_weight_masked(p, (keep_first ? 0xffffu : 0u) | (keep_second ? 0xffff0000u : 0u));
  }
  static Operand broadcast(const bf16* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return operand(pair);
  }
  static Operand broadcast_last(const bf16* p) { return operand(p->bits); }
  static Vec dot(Vec acc, const Weight& w, const Operand& x) { return CADENZA_ISA::dot(acc, w, x); }
  static Vec load(const bf16* p) { return load_bf16(p); }
  static Vec load_n(const bf16* p, int n) { return load_bf16_n(p, n); }
  static void store(bf16* p, Vec a) { store_bf16(p, a); }
  static void store_n(bf16* p, Vec a, int n) { store_bf16_n(p, a, n); }
};

template <>
struct Elem<float> {
  using Weight = Vec;
  using Operand = Vec;
  static Weight weight(const float* p) { return CADENZA_ISA::load(p); }
  static Weight weight_masked(const float* p, bool keep, bool) {
    return keep ? CADENZA_ISA::load(p) : zero();
  }
  static Operand broadcast(const float* p) { return set1(*p); }
  static Operand broadcast_last(const float* p) { return set1(*p); }
  static Vec dot(Vec acc, const Weight& w, const Operand& x) { return fma(w, x, acc); }
  static Vec load(const float* p) { return CADENZA_ISA::load(p); }
  static Vec load_n(const float* p, int n) { return CADENZA_ISA::load_n(p, n); }
  static void store(float* p, Vec a) { CADENZA_ISA::store(p, a); }
  static void store_n(float* p, Vec a, int n) { CADENZA_ISA::store_n(p, a, n); }
};

template <class T>
inline Vec load_some(const T* p, int n) {
  return n >= kLanes ? Elem<T>::load(p) : Elem<T>::load_n(p, n);
}
template <class T>
inline void store_some(T* p, Vec a, int n) {
  n >= kLanes ? Elem<T>::store(p, a) : Elem<T>::store_n(p, a, n);
}

}  // namespace cadenza::CADENZA_ISA
