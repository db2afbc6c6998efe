// Test data: reproducible random numbers, bf16 conversion, bitwise comparison.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/types.h"

namespace cadenza::tests {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252ull) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return uint32_t(state_ >> 16);
  }
  // Approximately standard normal: a sum of 12 uniform numbers.
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += float(next()) * 0x1p-32f;
    return sum - 6;
  }
  int below(int n) { return int(next() % uint32_t(n)); }

 private:
  uint64_t state_;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t raw = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &raw, 4);
  return value;
}
inline void set(float& out, float x) { out = x; }
inline void set(bf16& out, float x) {
  uint32_t raw;
  std::memcpy(&raw, &x, 4);
  if (x != x) {
    out.bits = uint16_t(raw >> 16 | 0x40);
  } else {
    out.bits = uint16_t((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
  }
}

template <class T>
constexpr DType dtype_of() {
  return kStep<T> == 2 ? DType::kBf16 : DType::kF32;
}
// Tolerance for rounding one element to T, relative.
template <class T>
constexpr double kEpsilon = kStep<T> == 2 ? 1.0 / 256 : 1.0 / (1 << 22);

template <class T>
std::vector<T> random_values(Random& random, int64_t count, float scale = 1) {
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) set(value, random.normal() * scale);
  return values;
}

// 64-byte aligned storage, filled with NaN bytes.
class Aligned {
 public:
  explicit Aligned(int64_t bytes) : storage_(size_t(bytes) + 64, 0xff) {}
  void* data() {
    return storage_.data() + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64;
  }

 private:
  std::vector<uint8_t> storage_;
};

template <class T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, size_t(count) * sizeof(T)) == 0;
}

}  // namespace cadenza::tests
