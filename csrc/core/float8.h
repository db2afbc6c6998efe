// Products with e4m3 weights (float8_e4m3fn): the layout, the packing and the arithmetic.
//
// A weight is one code for each element, and one f32 scale for each column and block of 128
// consecutive elements of K; the last block may be shorter. An element is value(code) * scale. A code
// is a sign, 4 bits of exponent with bias 7 and 3 of fraction; there are no infinities, and 0x7f and
// 0xff are NaN. Every value is exact in bf16 and f32, and the subnormal ones are normal there.
//
// Activations are multiplied in their own type. The sum of a block is, bit for bit, the dense product
// of the same ISA of the block's activations and the values of its codes, in the activations' type. The
// blocks are folded in ascending order, from 0:
//   sum = fma(sum of the block, scale, sum)
// which rounds twice where the ISA's fma does (scalar). So the order of every operation follows from
// K alone, as in the dense products.
//
// A panel is, for each block, 32 f32 scales and then the codes [steps][32 columns][2]; the partner of
// the last element of an odd K is 0. Where a column's block has a NaN code, its scale is NaN, which
// gives the same NaN outputs; the kernels do not look for the code.
#pragma once

#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace cadenza {

// The value of a code; NaN for 0x7f and 0xff.
constexpr float float8_value(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
  float value = exponent == 0 ? float(fraction) : float(8 + fraction);
  for (int e = exponent == 0 ? 1 : exponent; e < 10; e++) value *= 0.5f;
  for (int e = exponent; e > 10; e--) value *= 2.0f;
  return (code & 0x80) != 0 ? -value : value;
}

// Stored codes [rows, K] with their scales [rows, blocks of K].
struct Float8Source {
  const uint8_t* codes;
  int64_t rows;
  int64_t row_stride;
  const float* scales;
};

struct Float8PackTask {
  std::vector<Float8Source> sources;  // panels and columns as in PackTask
  int64_t k;
  uint8_t* packed;  // 64-byte aligned, panels * panel_bytes(kFloat8, k) long
  bool gated;
};

// The padding has codes and scales of 0. Throws std::invalid_argument for unsupported sizes or
// alignments.
void pack_float8(Executor& executor, const Float8PackTask& task);

}  // namespace cadenza
