#include "core/pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "core/half.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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
float widen(half x) { return f16_to_f32(x.bits); }

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

// Four words; GCC and Clang lower this to one vector register on every ISA.
using Words4 = uint32_t __attribute__((vector_size(16)));

Words4 load_words4(const uint32_t* from) {
  Words4 values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

// Transposes a 4x4 block: reads four columns `stride` words apart, writes four steps kPanel apart.
void transpose_4x4(const uint32_t* from, int64_t stride, uint32_t* to) {
  Words4 a = load_words4(from), b = load_words4(from + stride), c = load_words4(from + 2 * stride),
       d = load_words4(from + 3 * stride);
  Words4 ab = {a[0], b[0], a[1], b[1]}, cd = {c[0], d[0], c[1], d[1]};
  Words4 ab_late = {a[2], b[2], a[3], b[3]}, cd_late = {c[2], d[2], c[3], d[3]};
  Words4 steps[4] = {{ab[0], ab[1], cd[0], cd[1]},
                   {ab[2], ab[3], cd[2], cd[3]},
                   {ab_late[0], ab_late[1], cd_late[0], cd_late[1]},
                   {ab_late[2], ab_late[3], cd_late[2], cd_late[3]}};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * kPanel, &steps[i], sizeof(Words4));
}

// Copies with non-temporal stores on x86: packed weights are not read soon, and full-line stores
// need no read for ownership. Both pointers must be 16-byte aligned.
void store_nontemporal(const uint32_t* from, uint32_t* to, int64_t count) {
#if defined(__SSE2__)
  for (int64_t i = 0; i < count; i += 4) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, size_t(count) * sizeof(uint32_t));
#endif
}

void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A step of one column is four bytes for every packed type, so it is moved as one word.
static_assert(sizeof(bf16) * kStep<bf16> == 4 && sizeof(float) * kStep<float> == 4);

// Steps converted from each column at once (sequential reads), and steps transposed at once (fits
// L1). The stride is padded beyond a power of two to avoid cache-set conflicts between columns.
constexpr int64_t kReadSteps = 1024;
constexpr int64_t kReadStride = kReadSteps + 16;
constexpr int64_t kTransposeSteps = 64;
constexpr int64_t kPanelsPerClaim = 4;

// One packed column, which is a row of a source; `data` is null in the padding of the last panel.
struct Column {
  const void* data;
  DType dtype;
};

Column row_of(const PackSource& source, int64_t row) {
  int64_t size = source.dtype == DType::kF32 ? 4 : 2;
  return {static_cast<const uint8_t*>(source.data) + row * source.row_stride * size, source.dtype};
}

Column column_of(const PackTask& task, int64_t panel, int64_t lane) {
  if (task.gated) {
    const PackSource& source = task.sources[size_t(lane / kLanes)];
    int64_t row = panel * kLanes + lane % kLanes;
    return row < source.rows ? row_of(source, row) : Column{nullptr, source.dtype};
  }
  int64_t row = panel * kPanel + lane;
  for (const PackSource& source : task.sources) {
    if (row < source.rows) return row_of(source, row);
    row -= source.rows;
  }
  return {nullptr, DType::kF32};
}

template <class S, class T>
void convert_run(const void* from, int64_t begin, int64_t end, T* to) {
  const S* values = static_cast<const S*>(from) + begin;
  if constexpr (std::is_same_v<S, T>) {
    std::memcpy(to, values, size_t(end - begin) * sizeof(T));
  } else {
    for (int64_t i = 0; i < end - begin; i++) convert(values[i], to[i]);
  }
}

// Converts elements [begin, end) of a column; an incomplete last step is padded with zero.
template <class T>
void read_column(Column column, int64_t begin, int64_t end, T* to) {
  int64_t count = end - begin;
  if (column.data == nullptr) {
    std::memset(to, 0, size_t(count) * sizeof(T));
  } else if (column.dtype == DType::kBf16) {
    convert_run<bf16>(column.data, begin, end, to);
  } else if (column.dtype == DType::kF16) {
    convert_run<half>(column.data, begin, end, to);
  } else {
    convert_run<float>(column.data, begin, end, to);
  }
  if (count % kStep<T> != 0) std::memset(to + count, 0, sizeof(T));
}

// Transposes `count` steps of a panel's columns from `read` into the packed layout.
void write_steps(const uint32_t* read, int64_t count, uint32_t* to) {
  alignas(64) uint32_t transposed[kTransposeSteps * kPanel];
  for (int64_t first = 0; first < count; first += kTransposeSteps) {
    int64_t steps = std::min(kTransposeSteps, count - first);
    for (int64_t c = 0; c < kPanel; c += 4) {
      for (int64_t s = 0; s < steps; s += 4) {
        transpose_4x4(read + c * kReadStride + first + s, kReadStride, transposed + s * kPanel + c);
      }
    }
    store_nontemporal(transposed, to + first * kPanel, steps * kPanel);
  }
}

// A unit is one panel.
template <class T>
void pack_panels(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const PackTask*>(context);
  const int64_t steps = ceil_div(task.k, kStep<T>);
  uint32_t* read = worker.arena.take<uint32_t>(kPanel * kReadStride);
  for (int64_t panel = begin; panel < end; panel++) {
    uint32_t* to = static_cast<uint32_t*>(task.packed) + panel * steps * kPanel;
    for (int64_t first = 0; first < steps; first += kReadSteps) {
      int64_t count = std::min(kReadSteps, steps - first);
      for (int64_t c = 0; c < kPanel; c++) {
        read_column<T>(column_of(task, panel, c), first * kStep<T>,
                       std::min((first + count) * kStep<T>, task.k),
                       reinterpret_cast<T*>(read + c * kReadStride));
      }
      write_steps(read, count, to + first * kPanel);
    }
  }
  store_fence();
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool gated) {
  return (gated ? ceil_div(n, kLanes) : ceil_div(n, kPanel)) * panel_bytes(format_of(dtype), k);
}

void pack(Executor& executor, const PackTask& task) {
  check(!task.sources.empty() && task.k > 0, "pack: sizes must be positive");
  check(reinterpret_cast<uintptr_t>(task.packed) % 64 == 0, "pack: buffer is not 64-byte aligned");
  check(task.packed_dtype != DType::kF16, "pack: packed weights are bf16 or f32");
  int64_t columns = 0;
  for (const PackSource& source : task.sources) {
    check(source.rows >= 0 && source.row_stride >= task.k, "pack: a source has too few elements");
    columns += source.rows;
  }
  if (task.gated) {
    check(task.sources.size() == 2 && task.sources[0].rows == task.sources[1].rows,
          "pack: gate and up must be two sources of equal sizes");
  }
  int64_t panels = task.gated ? ceil_div(columns / 2, kLanes) : ceil_div(columns, kPanel);
  UnitFn run = task.packed_dtype == DType::kBf16 ? pack_panels<bf16> : pack_panels<float>;
  Executor::Lease lease(executor);
  lease.run({run, &task, panels, kPanelsPerClaim}, columns * task.k > (1 << 16));
}

void unpack_column(const void* packed, DType dtype, int64_t k, int64_t column, float* out) {
  const int64_t step = dtype == DType::kBf16 ? kStep<bf16> : kStep<float>;
  const int64_t panel = column / kPanel * ceil_div(k, step) * kPanel;
  for (int64_t i = 0; i < k; i++) {
    int64_t at = (panel + i / step * kPanel + column % kPanel) * step + i % step;
    out[i] = dtype == DType::kBf16 ? widen(static_cast<const bf16*>(packed)[at])
                                   : static_cast<const float*>(packed)[at];
  }
}

}  // namespace cadenza
