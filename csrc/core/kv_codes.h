// KV in int8: the layout of a page's codes, and the arithmetic of attention over them.
//
// A key or a value of one token and KV head, as it would be stored in the activations' type (keys
// after norm and RoPE), becomes D int8 codes and one f32 scale:
//   largest = max |x|; code = round_even(x * (127 / largest)); scale = largest / 127.
//   Below a largest of 2^-64, codes and scale are 0. With a NaN or an infinity the codes are 0 and
//   the scale is NaN, so that every query that sees the token gets NaN.
// A query head is quantised more finely, from f32, after norm and RoPE, to coarse and fine codes:
//   y = x * (127 / largest); coarse = round_even(y); fine = round_even((y - coarse) * 254);
//   scale = largest / (127 * 254); the query is (254 * coarse + fine) * scale.
// Scores, where the dots of codes are exact integers:
//   score = (f32(254 * coarse dot + fine dot) * query scale) * key scale
// Softmax spans and their maxima are those of attention over KV in the activations' type; with
// p = exp2(scaled score - maximum), the denominator is the sum of p. Each sub-block of sixteen
// tokens at an absolute position then has weights w = p * value scale, 0 outside the query's range,
// which are quantised like a key, but to codes from 0 to 254. Sub-blocks are folded in ascending
// order, from 0:
//   numerator = fma(f32(dot of weight codes and value codes), weight scale, numerator)
// Every rounding depends on one query, one token or one sub-block alone, so the bits depend neither
// on the number of rows nor on chunks and pages.
//
// A sub-block of sixteen tokens for one KV head is 16 * (D + 4) bytes: keys as [D/4][16][4] codes
// + 128, values as [16/4][D][4] codes; then the scales of the tokens, [16] f32.
#pragma once

#include "core/types.h"

namespace cadenza {

// Bytes of one token's codes and scale, for one KV head's key or value.
constexpr int64_t kv_code_bytes(int64_t head_size) { return head_size + int64_t(sizeof(float)); }

// What belongs to the codes of a query: their scale, and their sum, 254 for each coarse one.
struct CodeTerms {
  float scale;
  int32_t sum;
};

constexpr float kMostCode = 127.0f;
constexpr int32_t kFinePerCoarse = 254;
constexpr float kMostWeightCode = 254.0f;

}  // namespace cadenza
