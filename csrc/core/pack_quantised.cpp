#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "core/code_format.h"
#include "core/half.h"
#include "core/pack.h"

namespace cadenza {

namespace {

constexpr int64_t kPanelsPerClaim = 4;
constexpr int kMostCode = 127;     // of int8, and its negative
constexpr int kMostNibble = 15;    // of int4
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

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

// The stored row of row `row` of a source.
int64_t stored_row(const CodeSource& source, int64_t row) {
  if (source.paired_heads == 0) return row;
  const int64_t height = source.rows.rows / source.paired_heads, half = height / 2;
  const int64_t within = row % height;
  return row - within + 2 * (within % half) + within / half;
}

CodeColumn code_column(const QuantisedPackTask& task, int64_t panel, int64_t lane) {
  if (task.gated) {
    const CodeSource& source = task.sources[size_t(lane / kLanes)];
    int64_t row = panel * kLanes + lane % kLanes;
    return row < source.rows.rows ? CodeColumn{&source, stored_row(source, row)} : CodeColumn{};
  }
  int64_t row = panel * kPanel + lane;
  for (const CodeSource& source : task.sources) {
    if (row < source.rows.rows) return {&source, stored_row(source, row)};
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

uint16_t to_f16(float value) {
  return std::signbit(value) ? uint16_t(0x8000 | f32_to_f16(-value)) : f32_to_f16(value);
}

// Rounds a group's scale to f16 and returns its inverse, or 0 if all codes are 0.
float set_scale(float scale, CodeGroup& group) {
  const float rounded = f16_to_f32(f32_to_f16(scale));
  const bool is_finite = rounded <= std::numeric_limits<float>::max();
  group.scales[0] = group.scales[1] = is_finite ? rounded : kNaN;
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
  group.zero_point = int(zero);
  for (int i = 0; i < kGroup; i++) {
    const float code = round_even(values[i] * inverse) + zero;
    group.codes[i] = int8_t(std::clamp(code, 0.0f, float(kMostNibble)));
  }
}

void quantise(int target, const float (&values)[kGroup], CodeGroup& group) {
  for (float value : values) {
    if (value - value == 0.0f) continue;
    group.scales[0] = group.scales[1] = kNaN;
    return;
  }
  target == kInt4Format ? quantise_int4(values, group) : quantise_int8(values, group);
}

float read_scale(ScaleType type, const void* scales, int64_t at) {
  if (type == ScaleType::kF16) return f16_to_f32(static_cast<const uint16_t*>(scales)[at]);
  return static_cast<const float*>(scales)[at];
}

void read_codes(const CodeColumn& column, int64_t k, int64_t index, CodeGroup& group) {
  const CodeSource& source = *column.source;
  const CodeFormat format = kCodeFormats[source.format];
  const int64_t begin = index * kGroup, count = std::min<int64_t>(kGroup, k - begin);
  const auto* codes = static_cast<const int8_t*>(source.rows.data);
  std::memcpy(group.codes, codes + column.row * source.rows.row_stride + begin, size_t(count));
  const int64_t per_row = ceil_div(k, format.group), first = begin / format.group;
  for (int part = 0; part < 2; part++) {
    const int64_t within = format.num_parts() == 2 ? part : 0;
    if (first + within >= per_row) break;  // the rest of the last group
    const int64_t at = column.row * per_row + first + within;
    group.scales[part] = read_scale(format.scale, source.scales, at);
    if (format.correction == Correction::kOffset) {
      group.offsets[part] = read_scale(format.scale, source.corrections, at);
    }
    if (format.correction == Correction::kZeroPoint) {
      group.zero_point = static_cast<const uint8_t*>(source.corrections)[at];
    }
  }
  // Elements beyond K are zeros, as if they had been quantised.
  std::fill(group.codes + count, group.codes + kGroup, int8_t(group.zero_point));
}

CodeGroup read_group(CodeColumn column, int64_t k, int64_t index) {
  CodeGroup group{};
  if (column.source == nullptr) return group;
  if (const BlockType* blocks = column.source->blocks; blocks != nullptr) {
    const auto* rows = static_cast<const uint8_t*>(column.source->rows.data);
    blocks->read(rows + column.row * column.source->rows.row_stride, index, group);
    return group;
  }
  if (column.source->scales != nullptr) {
    read_codes(column, k, index, group);
    return group;
  }
  const int64_t begin = index * kGroup, count = std::min<int64_t>(kGroup, k - begin);
  float values[kGroup] = {};
  read_floats(column.source->rows, column.row, begin, count, values);
  quantise(column.source->target, values, group);
  return group;
}

void store_scales(const CodeFormat& format, const float (&scales)[2], int64_t column, uint8_t* to) {
  for (int part = 0; part < format.num_parts(); part++) {
    const int64_t at = part * kPanel + column;
    if (format.scale == ScaleType::kF32) {
      std::memcpy(to + at * 4, &scales[part], 4);
    } else if (format.scale == ScaleType::kBf16) {  // powers of two, which are exact
      uint32_t raw;
      std::memcpy(&raw, &scales[part], 4);
      const uint16_t half = uint16_t(raw >> 16);
      std::memcpy(to + at * 2, &half, 2);
    } else {
      const uint16_t half = to_f16(scales[part]);
      std::memcpy(to + at * 2, &half, 2);
    }
  }
}

// Stores nested scales in a group, and their factors, which the groups of a column share.
void store_nested(const CodeFormat& format, const NestedScales& nested, int64_t column, uint8_t* to,
                  uint8_t* factors) {
  for (int part = 0; part < format.num_parts(); part++) {
    to[format.code_bytes() + part * kPanel + column] = uint8_t(nested.scales[part] + 128);
  }
  std::memcpy(factors + column * 2, &nested.factor, 2);
  if (format.correction != Correction::kOffset) return;
  to[format.corrections_at() + column] = uint8_t(nested.offset + 128);
  std::memcpy(factors + (kPanel + column) * 2, &nested.offset_factor, 2);
}

uint32_t four_codes(const uint8_t* codes) {
  uint32_t word;
  std::memcpy(&word, codes, sizeof(word));
  return word;
}

void store_word(uint32_t word, int64_t at, uint8_t* to) {
  std::memcpy(to + at * int64_t(sizeof(word)), &word, sizeof(word));
}

// Stores the codes of a column, which have no sign, four bytes at a time.
void store_codes(const CodeFormat& format, const uint8_t (&codes)[kGroup], int64_t column,
                 uint8_t* to) {
  if (format.bits == 8) {
    for (int i = 0; i < kGroup / 4; i++) store_word(four_codes(codes + 4 * i), i * kPanel + column, to);
    return;
  }
  const int above = format.bits - 4;
  const uint32_t mask = above == 1 ? 0x01010101 : 0x03030303;
  for (int part = 0; part < format.num_parts(); part++) {
    const uint8_t* from = codes + part * format.group;
    uint8_t* part_to = to + part * format.code_bytes() / format.num_parts();
    for (int i = 0; i < format.group / 8; i++) {
      const uint32_t low = four_codes(from + 8 * i), high = four_codes(from + 8 * i + 4);
      store_word((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4, i * kPanel + column, part_to);
    }
    if (above == 0) continue;
    uint32_t highest = 0;
    for (int i = 0; i < format.group / 4; i++) {
      highest |= (four_codes(from + 4 * i) >> 4 & mask) << above * i;
    }
    store_word(highest, column, part_to + format.nibble_bytes());
  }
}

// The code of MXFP4 that stands for twice a value of E2M1.
uint8_t e2m1_index(int8_t doubled) {
  for (int i = 0; i < 16; i++) {
    if (kDoubledE2m1[i] == doubled) return uint8_t(i);
  }
  return 0;
}

// Where a group of a panel is stored.
struct GroupPlace {
  const CodeFormat& format;
  uint8_t* group;
  uint8_t* factors;
};

// Stores a column's codes, scales and correction.
void store_group(const GroupPlace& place, const CodeGroup& group, bool has_zero_point,
                 int64_t column) {
  const CodeFormat& format = place.format;
  // What is stored for a code: without sign, less a zero point that the format has no place for.
  int zero_point = group.zero_point, bias = 0;
  if (format.bits == 8 || format.correction == Correction::kNone) {
    bias = format.middle() - zero_point;
  }
  if (format.correction == Correction::kZeroPoint && !has_zero_point) bias = zero_point = 8;
  uint8_t stored[kGroup];
  for (int i = 0; i < kGroup; i++) {
    stored[i] = format.is_mxfp4() ? e2m1_index(group.codes[i]) : uint8_t(group.codes[i] + bias);
  }
  store_codes(format, stored, column, place.group);
  if (format.scale == ScaleType::kNested) {
    store_nested(format, group.nested, column, place.group, place.factors);
    return;
  }
  store_scales(format, group.scales, column, place.group + format.code_bytes());
  uint8_t* corrections = place.group + format.corrections_at();
  if (format.correction == Correction::kOffset) {
    store_scales(format, group.offsets, column, corrections);
  } else if (format.correction == Correction::kZeroPoint) {
    corrections[column] = uint8_t(zero_point);
  }
}

bool has_zero_points(const CodeColumn& column) {
  if (column.source == nullptr) return true;
  if (column.source->scales == nullptr && column.source->blocks == nullptr) return true;
  return kCodeFormats[column.source->format].correction == Correction::kZeroPoint;
}

// A unit is one panel.
void pack_code_panels(const void* context, int64_t first, int64_t last, Worker&) {
  const auto& task = *static_cast<const QuantisedPackTask*>(context);
  for (int64_t index = first; index < last; index++) {
    const CodePanel panel = code_panel(task.packed, index);
    const CodeFormat format = kCodeFormats[panel.format];
    uint8_t* begin = task.packed + (panel.data - task.packed);
    uint8_t* groups = begin + format.groups_at(task.k);
    CodeColumn columns[kPanel];
    for (int64_t c = 0; c < kPanel; c++) columns[c] = code_column(task, index, c);
    for (int64_t g = 0; g < ceil_div(task.k, kGroup); g++) {
      const GroupPlace place{format, groups + g * format.group_bytes(),
                             begin + g / (kNested / kGroup) * format.factor_bytes()};
      for (int64_t c = 0; c < kPanel; c++) {
        const CodeGroup group = read_group(columns[c], task.k, g);
        store_group(place, group, has_zero_points(columns[c]), c);
      }
    }
  }
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

bool is_code_format(int index) { return index >= 0 && index < kNumCodeFormats; }

// Checks that codes keep their values in the target.
void check_target(const CodeFormat& from, const CodeFormat& to) {
  const bool fits = to.scale == ScaleType::kNested || to.is_mxfp4() || from.is_mxfp4()
                        ? from == to || (from.is_mxfp4() && to.scale == ScaleType::kF32)
                    : to.scale == ScaleType::kF16  ? from.scale == ScaleType::kF16
                                                   : true;
  check(from.bits <= to.bits && fits && from.group >= to.group,
        "pack: the target is smaller than the codes' format");
  check(from.correction != Correction::kOffset || to.correction == Correction::kOffset,
        "pack: the target has no offsets");
  check(to.bits == 8 || (from.bits == to.bits && from.correction == to.correction) ||
            (from.correction == Correction::kNone && to.correction == Correction::kZeroPoint),
        "pack: the target's bits cannot hold the codes");
}

void check_blocks(const CodeSource& source, int64_t k) {
  const BlockType& type = *source.blocks;
  check(k % type.elements == 0 && source.rows.row_stride >= k / type.elements * type.bytes,
        "pack: a row of blocks is too short");
  check(type.is_nested || kCodeFormats[source.target].scale != ScaleType::kNested,
        "pack: the blocks have no nested scales");
}

void check_source(const CodeSource& source, int64_t k) {
  check(source.rows.rows >= 0 && is_code_format(source.target), "pack: the target has no kernels");
  check(source.paired_heads >= 0 && (source.paired_heads == 0 ||
                                     source.rows.rows % (2 * source.paired_heads) == 0),
        "pack: the heads' rows are not pairs");
  if (source.scales == nullptr && source.blocks == nullptr) {
    check(source.rows.row_stride >= k, "pack: a source has too few elements");
    check(source.target == kInt8Format || source.target == kInt4Format,
          "pack: floats are quantised to int8 or int4 only");
    return;
  }
  check(is_code_format(source.format), "pack: codes of a format without kernels");
  const CodeFormat from = kCodeFormats[source.format];
  check_target(from, kCodeFormats[source.target]);
  if (source.blocks != nullptr) return check_blocks(source, k);
  check(source.rows.row_stride >= k && from.scale != ScaleType::kNested,
        "pack: a source has too few elements");
  check((from.correction == Correction::kNone) == (source.corrections == nullptr),
        "pack: codes need the zero points or offsets of their format");
}

// Checks that an order has each index below k once.
void check_order(const int32_t* order, int64_t k) {
  std::vector<bool> is_used(size_t(k), false);
  for (int64_t i = 0; i < k; i++) {
    const int64_t index = order[i];
    check(index >= 0 && index < k && !is_used[size_t(index)],
          "pack: the order of the inputs does not have each of them once");
    is_used[size_t(index)] = true;
  }
}

// The segments of a weight: of consecutive sources with one target.
CodesHeader header_of(const QuantisedPackTask& task) {
  CodesHeader header{CodesHeader::kVersion, 0, task.order != nullptr, task.k, {}};
  const int64_t width = task.gated ? kLanes : kPanel;
  int64_t columns = 0;
  for (size_t i = 0; i < task.sources.size(); i++) {
    const CodeSource& source = task.sources[i];
    if (i > 0 && source.target != task.sources[i - 1].target) {
      check(!task.gated && columns % kPanel == 0 && header.num_segments < CodesHeader::kMaxSegments,
            "pack: the formats change within a panel");
      columns = 0;
    }
    if (columns == 0) header.segments[header.num_segments++].format = source.target;
    if (!task.gated || i == 0) columns += source.rows.rows;
    header.segments[header.num_segments - 1].panels = int32_t(ceil_div(columns, width));
  }
  return header;
}

}  // namespace

void pack_quantised(Executor& executor, const QuantisedPackTask& task) {
  check(!task.sources.empty() && task.k > 0, "pack: sizes must be positive");
  check(reinterpret_cast<uintptr_t>(task.packed) % 32 == 0, "pack: buffer is not 32-byte aligned");
  int64_t columns = 0;
  for (const CodeSource& source : task.sources) {
    check_source(source, task.k);
    columns += source.rows.rows;
  }
  if (task.gated) {
    check(task.sources.size() == 2 && task.sources[0].rows.rows == task.sources[1].rows.rows,
          "pack: gate and up must be two sources of equal sizes");
  }
  const CodesHeader header = header_of(task);
  check(header.num_bytes() == task.packed_bytes, "pack: the buffer has another size");
  std::memset(task.packed, 0, size_t(header.panels_at()));
  std::memcpy(task.packed, &header, sizeof(header));
  if (task.order != nullptr) {
    check_order(task.order, task.k);
    std::memcpy(task.packed + sizeof(header), task.order, size_t(task.k) * sizeof(*task.order));
  }
  Executor::Lease lease(executor);
  lease.run({pack_code_panels, &task, header.num_panels(), kPanelsPerClaim},
            columns * task.k > (1 << 16));
}

}  // namespace cadenza
