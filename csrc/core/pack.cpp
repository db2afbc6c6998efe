#include "core/pack.h"

#include <cstring>
#include <stdexcept>

namespace cadenza {

namespace {

float from_bits(uint32_t raw) {
  float value;
  std::memcpy(&value, &raw, sizeof(value));
  return value;
}

uint32_t to_bits(float value) {
  uint32_t raw;
  std::memcpy(&raw, &value, sizeof(raw));
  return raw;
}

struct half {
  uint16_t bits;
};

float widen(float x) { return x; }
float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
float widen(half x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31;
  uint32_t fraction = x.bits & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = float(fraction) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

void narrow(float x, float& out) { out = x; }
void narrow(float x, bf16& out) {
  uint32_t raw = to_bits(x);
  bool is_nan = (raw & 0x7fffffffu) > 0x7f800000u;
  uint32_t rounded = is_nan ? raw >> 16 | 0x40 : (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
  out.bits = uint16_t(rounded);
}

template <class S, class T>
void convert(S from, T& to) {
  narrow(widen(from), to);
}
void convert(bf16 from, bf16& to) { to = from; }

// Which packed column a row of the source becomes.
int64_t place(const PackTask& task, int64_t row) {
  int64_t column = task.column_offset + row;
  if (task.layout == PackLayout::kPlain) return column;
  int64_t shift = task.layout == PackLayout::kUp ? kLanes : 0;
  return column / kLanes * kPanel + column % kLanes + shift;
}

template <class T>
T* column_start(const PackTask& task, int64_t column) {
  int64_t steps = ceil_div(task.k, kStep<T>);
  T* packed = static_cast<T*>(task.packed);
  return packed + (column / kPanel * steps * kPanel + column % kPanel) * kStep<T>;
}

template <class S, class T>
void pack_row(const PackTask& task, int64_t row) {
  const S* from = static_cast<const S*>(task.source) + row * task.row_stride;
  T* to = column_start<T>(task, place(task, row));
  for (int64_t i = 0; i < task.k; i++) {
    convert(from[i], to[i / kStep<T> * kPanel * kStep<T> + i % kStep<T>]);
  }
  if (task.k % kStep<T> != 0)
    std::memset(to + task.k / kStep<T> * kPanel * kStep<T> + 1, 0, sizeof(T));
}

template <class T>
void clear_column(const PackTask& task, int64_t row) {
  T* to = column_start<T>(task, place(task, row));
  for (int64_t s = 0; s < ceil_div(task.k, kStep<T>); s++) {
    std::memset(to + s * kPanel * kStep<T>, 0, sizeof(T) * kStep<T>);
  }
}

// Units are the source's rows, then the padding columns.
template <class S, class T>
void pack_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const PackTask*>(context);
  for (int64_t row = begin; row < end; row++) {
    row < task.rows ? pack_row<S, T>(task, row) : clear_column<T>(task, row);
  }
}

template <class T>
UnitFn units_for(DType source) {
  switch (source) {
    case DType::kBf16:
      return pack_units<bf16, T>;
    case DType::kF16:
      return pack_units<half, T>;
    case DType::kF32:
      return pack_units<float, T>;
  }
  return nullptr;
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool gated) {
  int64_t panels = gated ? ceil_div(n, kLanes) : ceil_div(n, kPanel);
  return dtype == DType::kF32 ? panels * kPanel * k * 4 : panels * kPanel * round_up(k, 2) * 2;
}

void pack(Executor& executor, const PackTask& task) {
  check(task.rows >= 0 && task.k > 0 && task.column_offset >= 0, "pack: sizes must be positive");
  check(task.column_offset + task.rows <= task.n, "pack: rows do not fit the packed columns");
  check(reinterpret_cast<uintptr_t>(task.packed) % 64 == 0, "pack: buffer is not 64-byte aligned");
  check(task.packed_dtype != DType::kF16, "pack: packed weights are bf16 or f32");
  int64_t width = task.layout == PackLayout::kPlain ? kPanel : kLanes;
  bool is_last = task.column_offset + task.rows == task.n;
  int64_t padding = is_last ? round_up(task.n, width) - task.n : 0;
  UnitFn run = task.packed_dtype == DType::kBf16 ? units_for<bf16>(task.source_dtype)
                                                 : units_for<float>(task.source_dtype);
  Executor::Lease lease(executor);
  lease.run({run, &task, task.rows + padding, kPanel}, task.rows * task.k > (1 << 16));
}

void unpack_column(const void* packed, DType dtype, int64_t k, int64_t column, float* out) {
  PackTask task{};
  task.packed = const_cast<void*>(packed);
  task.k = k;
  for (int64_t i = 0; i < k; i++) {
    if (dtype == DType::kBf16) {
      out[i] = widen(column_start<bf16>(task, column)[i / 2 * kPanel * 2 + i % 2]);
    } else {
      out[i] = column_start<float>(task, column)[i * kPanel];
    }
  }
}

}  // namespace cadenza
