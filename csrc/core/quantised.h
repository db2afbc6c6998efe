// Quantised products: layouts of codes, and the arithmetic that every ISA follows bit for bit.
//
// Activations are int8 codes with one f32 scale for each row and group of 32 elements of K:
//   largest = max |x| of the group; code = round_even(x * (127 / largest)); scale = largest / 127.
//   A group whose largest is below 2^-64 has codes and scale 0, so no later value is denormal. One
//   with a NaN or an infinity has codes 0 and a NaN scale, so that the row's outputs are NaN.
// Most of a product's error comes from the groups with the largest scales, so one of every 64 groups has
// second codes: that with the largest `largest`, the first of equals. They are the codes of its
// remainders, fma(-code, scale, x), by the same rules, with a scale of their own.
// Weights are integer codes with one scale for each column and group of 32 or 16 elements, and with a
// zero point, an offset or neither (core/code_format.h); an element is (code - zero point) * scale +
// offset. The codes of MXFP4 are those of the values that its nibbles stand for. Quantised from floats, in groups of 32 with f16 scales:
//   int8: largest = max |w|; scale = f16(largest / 127); code = round_even(w * (1 / scale)), clamped
//   to [-127, 127]; all 0 if the scale is 0, and a NaN scale if a value or the scale is not finite.
//   int4: low = min(0, min w), high = max(0, max w); scale = f16((high - low) / 15); zero point =
//   round_even(-low * (1 / scale)); code = round_even(w * (1 / scale)) + zero point, both clamped to
//   [0, 15]. Not finite as for int8.
// Where the weight has an order of its inputs, the groups of the activations are of x in that order.
// A product folds the weight's groups in ascending order, from 0, with dot = the sum of activation
// code * (weight code - zero point) and total = the sum of the activation codes:
//   sum = fma(f32(dot) * activation scale, weight scale, sum), then with offsets
//   sum = fma(f32(total) * activation scale, offset, sum)
// and then the second codes in the same way, with the weights of their groups.
// Dots and totals are exact integers, so these roundings are all: the bits depend neither on the
// number of rows nor on the instruction set.
#pragma once

#include "core/code_format.h"
#include "core/ops.h"

namespace cadenza {

// The codes of an activation group's elements are followed by these, for all groups of the row.
struct GroupTerms {
  float scale;
  int16_t totals[2];  // the sums of the first and of the last sixteen codes
};

// The second codes of one group.
struct Remainder {
  int8_t codes[kGroup];
  GroupTerms terms;
  int64_t group;
};
constexpr int64_t kRemainderSpan = 64;  // groups, of which one has a remainder

// Bytes of a row of activation codes: [groups][32] int8, zero beyond K, [groups] GroupTerms, then
// a Remainder for each span of groups that begins.
constexpr int64_t remainders_at(int64_t k) {
  return ceil_div(k, kGroup) * int64_t(kGroup + sizeof(GroupTerms));
}
constexpr int64_t num_remainders(int64_t k) { return ceil_div(k, kGroup * kRemainderSpan); }
constexpr int64_t code_row_bytes(int64_t k) {
  return remainders_at(k) + num_remainders(k) * int64_t(sizeof(Remainder));
}

// The smallest largest magnitude of a group that is not zero, as bits: 2^-64.
constexpr uint32_t kSmallestLargest = uint32_t(127 - 64) << 23;

struct QuantiseTask {
  int64_t rows, k;
  const void* x;  // activation dtype [rows, K]
  uint8_t* out;   // [rows, code_row_bytes(K)]
  const int32_t* const* orders;  // [rows]: the order of each row's inputs; null: as they come
};

// The kernels of a product.
struct ProductKernels {
  int max_rows;  // rows of one register tile
  UnitFn linear, gated, logits, grouped_gated, grouped_linear, combine, head_linear;
};

// Chosen by weight format and activation type.
ProductKernels product_kernels(const Runtime& runtime, ProductTypes types);

// The operands of a product whose rows may have to be quantised.
struct ProductInput {
  int64_t rows, k;
  const void* x;  // activation dtype [rows, K]
  const void* w;  // the packed weight; for experts their first one
};
// The rows as the product reads them: x itself, or its codes in scratch memory.
const void* product_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                         const ProductInput& input);
// Quantises the rows of `task`, whose `out` is scratch memory that is taken here.
const void* quantise_rows(const Runtime& runtime, Executor::Lease& lease, ProductTypes types,
                          QuantiseTask task);
// Bytes of a row as it is, and as the product reads it.
int64_t activation_row_bytes(ProductTypes types, int64_t k);
int64_t product_row_bytes(ProductTypes types, int64_t k);

}  // namespace cadenza
