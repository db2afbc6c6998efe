// A vector of sixteen f32 lanes with the same interface on every ISA, so kernels are written once.
//
// A translation unit defines CADENZA_ISA, its namespace, before it includes this file. All inline
// functions are in that namespace; otherwise the linker could merge functions of different ISAs.
#pragma once

#include <type_traits>

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
//
// A product reads packed weights and KV as words of 32 bits (one f32, or two bf16 that are adjacent
// along the reduction) and takes kProducts multiply-adds for each: `weight<P>` is the column vector
// of the P-th, `broadcast` its element of x. With bf16 arithmetic one instruction multiplies both
// elements of a word. Without it they are widened to f32 and multiplied in ascending order, and x
// is widened once, before the product: `Input` is the type in which x is stored for it.
template <class T>
struct Elem;

struct Bf16Memory {
  static Vec load(const bf16* p) { return load_bf16(p); }
  static Vec load_n(const bf16* p, int n) { return load_bf16_n(p, n); }
  static void store(bf16* p, Vec a) { store_bf16(p, a); }
  static void store_n(bf16* p, Vec a, int n) { store_bf16_n(p, a, n); }
  // A word of which only some elements are kept, the others being zero.
  static VecI words_masked(const bf16* p, bool keep_first, bool keep_second) {
    uint32_t keep = (keep_first ? 0xffffu : 0u) | (keep_second ? 0xffff0000u : 0u);
    return and_i(load_words(p), set1_i(keep));
  }
};

#ifdef CADENZA_VEC_BF16_DOT
template <>
struct Elem<bf16> : Bf16Memory {
  using Input = bf16;
  using Weight = PairVec;
  static constexpr int kProducts = 1;
  template <int P>
  static Weight weight(const bf16* p) {
    return as_pairs(load_words(p));
  }
  template <int P>
  static Weight weight_masked(const bf16* p, bool keep_first, bool keep_second) {
    return as_pairs(words_masked(p, keep_first, keep_second));
  }
  static PairOperand broadcast(const bf16* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return broadcast_pair(pair);
  }
  // The last element of an odd number; its partner in the weight is zero.
  static PairOperand broadcast_last(const bf16* p) { return broadcast_pair(p->bits); }
  static Vec multiply_add(Vec acc, const Weight& w, const PairOperand& x) { return dot(acc, w, x); }
  static void store_input(bf16* p, Vec a) { store_bf16(p, a); }
};
#else
template <>
struct Elem<bf16> : Bf16Memory {
  using Input = float;
  using Weight = Vec;
  static constexpr int kProducts = 2;
  template <int P>
  static Weight widen(VecI words) {
    return as_float(P == 0 ? shl<16>(words) : and_i(words, set1_i(0xffff0000u)));
  }
  template <int P>
  static Weight weight(const bf16* p) {
    return widen<P>(load_words(p));
  }
  template <int P>
  static Weight weight_masked(const bf16* p, bool keep_first, bool keep_second) {
    return widen<P>(words_masked(p, keep_first, keep_second));
  }
  static Operand broadcast(const float* p) { return CADENZA_ISA::broadcast(p); }
  static Operand broadcast_last(const float* p) { return CADENZA_ISA::broadcast(p); }
  static Vec multiply_add(Vec acc, const Weight& w, const Operand& x) {
    return CADENZA_ISA::multiply_add(acc, w, x);
  }
  // Rounds to bf16, like a store of elements.
  static void store_input(float* p, Vec a) {
    bf16 rounded[kLanes];
    store_bf16(rounded, a);
    CADENZA_ISA::store(p, load_bf16(rounded));
  }
};
#endif

template <>
struct Elem<float> {
  using Input = float;
  using Weight = Vec;
  static constexpr int kProducts = 1;
  template <int P>
  static Weight weight(const float* p) {
    return CADENZA_ISA::load(p);
  }
  template <int P>
  static Weight weight_masked(const float* p, bool keep, bool) {
    return keep ? CADENZA_ISA::load(p) : zero();
  }
  static Operand broadcast(const float* p) { return CADENZA_ISA::broadcast(p); }
  static Operand broadcast_last(const float* p) { return CADENZA_ISA::broadcast(p); }
  static Vec multiply_add(Vec acc, const Weight& w, const Operand& x) {
    return CADENZA_ISA::multiply_add(acc, w, x);
  }
  static Vec load(const float* p) { return CADENZA_ISA::load(p); }
  static Vec load_n(const float* p, int n) { return CADENZA_ISA::load_n(p, n); }
  static void store(float* p, Vec a) { CADENZA_ISA::store(p, a); }
  static void store_n(float* p, Vec a, int n) { CADENZA_ISA::store_n(p, a, n); }
  static void store_input(float* p, Vec a) { CADENZA_ISA::store(p, a); }
};

template <class T>
using Input = typename Elem<T>::Input;

template <class T>
inline Vec load_some(const T* p, int n) {
  return n >= kLanes ? Elem<T>::load(p) : Elem<T>::load_n(p, n);
}
template <class T>
inline void store_some(T* p, Vec a, int n) {
  n >= kLanes ? Elem<T>::store(p, a) : Elem<T>::store_n(p, a, n);
}

}  // namespace cadenza::CADENZA_ISA
