#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "core/half.h"
#include "core/pack.h"

namespace cadenza {

namespace {

constexpr int64_t kPanelsPerClaim = 4;
constexpr int kMostCode = 127;     // of int8, and its negative
constexpr int kMostNibble = 15;    // of int4
constexpr uint16_t kNaN = 0x7e00;  // as f16

float bf16_to_f32(uint16_t half) {
  uint32_t raw = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &raw, sizeof(value));
  return value;
}

// One column of a panel, which is a row of a source; `source` is null in the padding.
struct CodeColumn {
  const CodeSource* source;
  int64_t row;
};

// One column's part of a group.
struct CodeGroup {
  int8_t codes[kGroup];  // int4 codes are from 0 to 15
  uint16_t scale;
  uint8_t zero_point;
};

CodeColumn code_column(const QuantisedPackTask& task, int64_t panel, int64_t lane) {
  if (task.gated) {
    const CodeSource& source = task.sources[size_t(lane / kLanes)];
    int64_t row = panel * kLanes + lane % kLanes;
    return row < source.rows.rows ? CodeColumn{&source, row} : CodeColumn{nullptr, 0};
  }
  int64_t row = panel * kPanel + lane;
  for (const CodeSource& source : task.sources) {
    if (row < source.rows.rows) return {&source, row};
    row -= source.rows.rows;
  }
  return {nullptr, 0};
}

void read_floats(const PackSource& source, int64_t row, int64_t begin, int64_t count, float* out) {
  const int64_t at = row * source.row_stride + begin;
  if (source.dtype == DType::kF32) {
    std::memcpy(out, static_cast<const float*>(source.data) + at, size_t(count) * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(source.data) + at;
  for (int64_t i = 0; i < count; i++) {
    out[i] = source.dtype == DType::kBf16 ? bf16_to_f32(halves[i]) : f16_to_f32(halves[i]);
  }
}

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
float round_even(float value) { return (value + 12582912.0f) - 12582912.0f; }

// Rounds a group's scale and returns its inverse, or 0 if all codes are 0.
float set_scale(float scale, CodeGroup& group) {
  group.scale = f32_to_f16(scale);
  const float rounded = f16_to_f32(group.scale);
  if (!(rounded <= std::numeric_limits<float>::max())) group.scale = kNaN;
  return rounded > 0.0f ? 1.0f / rounded : 0.0f;
}

void quantise_int8(const float (&values)[kGroup], CodeGroup& group) {
  float largest = 0.0f;
  for (float value : values) largest = std::max(largest, std::abs(value));
  const float inverse = set_scale(largest / float(kMostCode), group);
  for (int i = 0; i < kGroup; i++) {
    const float code = round_even(values[i] * inverse);
    group.codes[i] = int8_t(std::clamp(code, -float(kMostCode), float(kMostCode)));
  }
}

void quantise_int4(const float (&values)[kGroup], CodeGroup& group) {
  float low = 0.0f, high = 0.0f;
  for (float value : values) low = std::min(low, value), high = std::max(high, value);
  const float inverse = set_scale((high - low) / float(kMostNibble), group);
  const float zero = std::clamp(round_even(-low * inverse), 0.0f, float(kMostNibble));
  group.zero_point = uint8_t(zero);
  for (int i = 0; i < kGroup; i++) {
    const float code = round_even(values[i] * inverse) + zero;
    group.codes[i] = int8_t(std::clamp(code, 0.0f, float(kMostNibble)));
  }
}

void quantise(WeightFormat format, const float (&values)[kGroup], CodeGroup& group) {
  for (float value : values) {
    if (value - value == 0.0f) continue;
    group.scale = kNaN;
    return;
  }
  format == WeightFormat::kInt4 ? quantise_int4(values, group) : quantise_int8(values, group);
}

CodeGroup read_group(WeightFormat format, CodeColumn column, int64_t k, int64_t index) {
  CodeGroup group{};
  if (column.source == nullptr) return group;
  const PackSource& rows = column.source->rows;
  const int64_t begin = index * kGroup, count = std::min<int64_t>(kGroup, k - begin);
  if (const uint16_t* scales = column.source->scales; scales != nullptr) {
    const auto* codes = static_cast<const int8_t*>(rows.data) + column.row * rows.row_stride;
    std::memcpy(group.codes, codes + begin, size_t(count));
    const int64_t at = column.row * ceil_div(k, kGroup) + index;
    group.scale = scales[at];
    if (format == WeightFormat::kInt4) group.zero_point = column.source->zero_points[at];
    // Elements beyond K are zeros, as if they had been quantised.
    std::fill(group.codes + count, group.codes + kGroup, int8_t(group.zero_point));
    return group;
  }
  float values[kGroup] = {};
  read_floats(rows, column.row, begin, count, values);
  quantise(format, values, group);
  return group;
}

// Stores a column's codes, scale and zero point in a group of a panel.
void store_group(WeightFormat format, const CodeGroup& group, int64_t column, uint8_t* to) {
  uint8_t* scales = to + kGroup * kPanel;
  if (format == WeightFormat::kInt8) {
    for (int64_t i = 0; i < kGroup; i++) {
      to[(i / 4 * kPanel + column) * 4 + i % 4] = uint8_t(group.codes[i] + 128);
    }
  } else {
    for (int64_t i = 0; i < kGroup / 2; i++) {
      const int64_t code = i / 4 * 8 + i % 4;  // beside code + 4
      to[(i / 4 * kPanel + column) * 4 + i % 4] =
          uint8_t(group.codes[code] | group.codes[code + 4] << 4);
    }
    scales = to + kGroup * kPanel / 2;
    scales[kPanel * 2 + column] = group.zero_point;
  }
  std::memcpy(scales + column * 2, &group.scale, sizeof(group.scale));
}

// A unit is one panel.
void pack_code_panels(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const QuantisedPackTask*>(context);
  for (int64_t panel = begin; panel < end; panel++) {
    uint8_t* to = task.packed + panel * panel_bytes(task.format, task.k);
    CodeColumn columns[kPanel];
    for (int64_t c = 0; c < kPanel; c++) columns[c] = code_column(task, panel, c);
    for (int64_t g = 0; g < ceil_div(task.k, kGroup); g++, to += group_bytes(task.format)) {
      for (int64_t c = 0; c < kPanel; c++) {
        store_group(task.format, read_group(task.format, columns[c], task.k, g), c, to);
      }
    }
  }
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

void pack_quantised(Executor& executor, const QuantisedPackTask& task) {
  check(is_quantised(task.format), "pack: the format must be int8 or int4");
  check(!task.sources.empty() && task.k > 0, "pack: sizes must be positive");
  check(reinterpret_cast<uintptr_t>(task.packed) % 32 == 0, "pack: buffer is not 32-byte aligned");
  int64_t columns = 0;
  for (const CodeSource& source : task.sources) {
    check(source.rows.rows >= 0 && source.rows.row_stride >= task.k,
          "pack: a source has too few elements");
    check(task.format != WeightFormat::kInt4 || (source.scales == nullptr) == (source.zero_points == nullptr),
          "pack: int4 codes need zero points");
    columns += source.rows.rows;
  }
  if (task.gated) {
    check(task.sources.size() == 2 && task.sources[0].rows.rows == task.sources[1].rows.rows,
          "pack: gate and up must be two sources of equal sizes");
  }
  int64_t panels = task.gated ? ceil_div(columns / 2, kLanes) : ceil_div(columns, kPanel);
  Executor::Lease lease(executor);
  lease.run({pack_code_panels, &task, panels, kPanelsPerClaim}, columns * task.k > (1 << 16));
}

}  // namespace cadenza
