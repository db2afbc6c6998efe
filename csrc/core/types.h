// Plain types shared by every layer: element types and the sizes that fix a packed layout.
#pragma once

#include <cstdint>

namespace cadenza {

struct bf16 {
  uint16_t bits;
};

enum class DType : int32_t { kBf16 = 0, kF32 = 1, kF16 = 2 };

// Columns of one packed weight panel and tokens of one KV sub-block; independent of the ISA.
constexpr int kPanel = 32;
constexpr int kLanes = 16;
// Tokens whose scores share one softmax before spans are merged in order.
constexpr int kSpan = 512;
// Entries of the "top" list that next_token can return.
constexpr int kTopLogprobs = 20;

// Elements of the reduction that one packed column keeps side by side: pairs for bf16.
template <class T>
constexpr int kStep = 1;
template <>
constexpr int kStep<bf16> = 2;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace cadenza
