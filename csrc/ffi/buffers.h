// Shared by the operations: typed views of XLA buffers, and exceptions as XLA statuses.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

#include "core/code_format.h"
#include "core/isa.h"
#include "core/ops.h"
#include "core/profile.h"
#include "xla/ffi/api/ffi.h"

namespace cadenza::xla_ffi {

namespace ffi = xla::ffi;
using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Whether the program that this thread runs takes the portable kernels.
inline thread_local bool takes_portable_kernels = false;

inline Runtime runtime() {
  return {takes_portable_kernels ? portable_kernels() : kernels(), integer_kernels(), executor()};
}

// bf16 or f32, the types of activations and weights; throws for any other.
inline DType element_type(const Any& buffer) {
  if (buffer.element_type() == ffi::BF16) return DType::kBf16;
  require(buffer.element_type() == ffi::F32, "expected bf16 or f32");
  return DType::kF32;
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

inline int64_t dim(const Any& buffer, size_t axis) {
  require(axis < buffer.dimensions().size(), "an operand has too few dimensions");
  return buffer.dimensions()[axis];
}

template <class T>
const T* data(const Any& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// An empty array, which stands for an absent operand.
inline Any absent() {
  static int64_t none[1] = {0};
  static const XLA_FFI_Buffer buffer{
      sizeof(XLA_FFI_Buffer), nullptr, XLA_FFI_DataType_F32, nullptr, 1, none};
  return Any(&buffer);
}

// The buffer's elements, or null for an empty array, which stands for an absent operand.
inline const float* optional_f32(const Any& buffer) {
  if (buffer.element_count() == 0) return nullptr;
  require(buffer.element_type() == ffi::F32, "bias, residual and norm weight operands must be f32");
  return data<float>(buffer);
}

inline const int32_t* int32(const Any& buffer) {
  require(buffer.element_type() == ffi::S32, "expected int32");
  return data<int32_t>(buffer);
}

inline const int32_t* optional_int32(const Any& buffer) {
  return buffer.element_count() == 0 ? nullptr : int32(buffer);
}

// The true number of rows, at most the padded number.
inline int64_t true_count(const Any& count, int64_t padded) {
  require(count.element_count() >= 1, "count must hold one int32");
  int64_t n = int32(count)[0];
  require(n >= 0 && n <= padded, "the true count is outside the padded rows");
  return n;
}

// The format of a packed weight by its element type: one of codes is u8.
inline WeightFormat weight_format(const Any& weight) {
  if (weight.element_type() == ffi::U8) return WeightFormat::kCodes;
  if (weight.element_type() == ffi::F8E4M3FN) return WeightFormat::kFloat8;
  return format_of(element_type(weight));
}

// The types of a product of activations x and a packed weight.
inline ProductTypes product_types(const Any& x, const Any& weight) {
  ProductTypes types{weight_format(weight), element_type(x)};
  const bool is_like_activations = types.weight <= WeightFormat::kF32;
  require(!is_like_activations || types.weight == format_of(types.activation),
          "weight and activation types differ");
  return types;
}

// Whether the header of a weight of codes is valid and fits its columns, its reduction and its bytes.
inline bool is_packed_codes(const Any& weight, size_t first, int64_t columns, int64_t k) {
  if (weight.dimensions().size() != first + 1) return false;
  const int64_t bytes = dim(weight, first);
  if (bytes < int64_t(sizeof(CodesHeader))) return false;
  const CodesHeader& header = codes_header(weight.untyped_data());
  return header.is_valid() && header.k == k && header.num_panels() == ceil_div(columns, kPanel) &&
         header.num_bytes() == bytes;
}

// Steps of a packed weight of floats; e4m3 weights have their scales in steps too.
inline int64_t num_steps(WeightFormat format, int64_t k) {
  if (format == WeightFormat::kFloat8) return panel_bytes(format, k) / kFloat8StepBytes;
  return format == WeightFormat::kBf16 ? ceil_div(k, 2) : k;
}

// Whether the axes from `first` on are those of a packed weight: [panels, steps, 32, step], or [bytes]
// for one of codes.
inline bool is_packed(const Any& weight, size_t first, int64_t columns, int64_t k) {
  if (is_quantised(weight_format(weight))) return is_packed_codes(weight, first, columns, k);
  const WeightFormat format = weight_format(weight);
  int64_t step = format == WeightFormat::kF32 ? 1 : 2;
  return weight.dimensions().size() == first + 4 &&
         dim(weight, first) == ceil_div(columns, kPanel) &&
         dim(weight, first + 1) == num_steps(format, k) && dim(weight, first + 2) == kPanel &&
         dim(weight, first + 3) == step;
}

inline void require_packed(const Any& weight, int64_t columns, int64_t k) {
  require(is_packed(weight, 0, columns, k),
          "the packed weight's shape does not fit its columns and reduction");
}

// Runs a target's body and converts exceptions to statuses; none may propagate into XLA.
template <class Body>
ffi::Error guarded(const char* name, Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(name) + ": out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + error.what());
  }
}

}  // namespace cadenza::xla_ffi
