// Element types, and the sizes that define the packed layouts.
#pragma once

#include <cstdint>

namespace cadenza {

struct bf16 {
  uint16_t bits;
};

enum class DType : int32_t { kBf16 = 0, kF32 = 1, kF16 = 2 };

// How a packed weight stores its elements. One of integer codes begins with its formats
// (core/code_format.h).
enum class WeightFormat : int32_t { kBf16 = 0, kF32 = 1, kCodes = 2, kFloat8 = 3 };
constexpr bool is_quantised(WeightFormat format) { return format == WeightFormat::kCodes; }

// The format of weights that are stored like activations, in bf16 or f32.
constexpr WeightFormat format_of(DType dtype) {
  return dtype == DType::kBf16 ? WeightFormat::kBf16 : WeightFormat::kF32;
}

// The types by which the kernels of a product are chosen.
struct ProductTypes {
  WeightFormat weight;
  DType activation;

  // Weights are stored like the activations.
  constexpr ProductTypes(DType dtype) : weight(format_of(dtype)), activation(dtype) {}
  constexpr ProductTypes(WeightFormat weight_, DType activation_)
      : weight(weight_), activation(activation_) {}
};

// How keys and values are stored: like the activations, or as int8 codes (core/kv_codes.h).
enum class KvFormat : int32_t { kActivations = 0, kInt8 = 1 };

// Columns of a packed weight panel; tokens of a KV sub-block. The same for every ISA.
constexpr int kPanel = 32;
constexpr int kLanes = 16;
// Tokens of a softmax span: one maximum and one sum each; spans are merged in order.
constexpr int kSpan = 512;

// In place of a token that no row chooses: there is none.
constexpr int64_t kNoToken = -1;

// Keys whose weights are averaged for a key's score: itself, and as many before as behind it.
constexpr int kPool = 13;
// Entries of the top-logprobs list in a result of next_token.
constexpr int kTopLogprobs = 20;

// K step: consecutive elements of the reduction that a packed column stores together; 2 for bf16.
template <class T>
inline constexpr int kStep = 1;
template <>
inline constexpr int kStep<bf16> = 2;

// A weight's e4m3 code (core/float8.h), multiplied by activations of type T.
template <class T>
struct Float8 {
  uint8_t code;
};
template <class T>
constexpr int kStep<Float8<T>> = 2;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Consecutive elements of a reduction that are rounded together.
constexpr int kGroup = 32;

// Consecutive elements of a reduction whose e4m3 codes have one scale, and the bytes of a panel's
// scales of one such block and of one step of its codes: core/float8.h.
constexpr int kFloat8Block = 128;
constexpr int64_t kFloat8ScaleBytes = kPanel * 4;
constexpr int64_t kFloat8StepBytes = kPanel * 2;

// Bytes of one packed panel of a weight of floats with reduction k.
constexpr int64_t panel_bytes(WeightFormat format, int64_t k) {
  if (format == WeightFormat::kFloat8) {
    return ceil_div(k, 2) * kFloat8StepBytes + ceil_div(k, kFloat8Block) * kFloat8ScaleBytes;
  }
  return format == WeightFormat::kF32 ? k * kPanel * 4 : ceil_div(k, kStep<bf16>) * kPanel * 4;
}

}  // namespace cadenza
