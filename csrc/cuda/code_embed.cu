#include "cuda/code_embed.h"

#include "cuda/codes.h"

namespace cadenza::cuda {

namespace {

constexpr unsigned kThreads = 128;

// Byte b of the word of a column, of which a step of 128 bytes has 32.
__device__ __forceinline__ int byte_of(const uint8_t* step, int column, int b) { return step[column * 4 + b]; }

// The code of element `within` of a group of a column, less the zero of formats without corrections.
__device__ __forceinline__ int code_of(const FormatTable::Entry& format, const uint8_t* group, int column,
                                       int within) {
  constexpr int kStep = kPanel * 4;
  const Unpacking unpacking = format.unpacking;
  if (unpacking == Unpacking::kBytes || unpacking == Unpacking::kHalfBytes) {
    return byte_of(group + within / 4 * kStep, column, within % 4) - 128;
  }
  const int in_part = unpacking == Unpacking::kSixBits ? within % 16 : within;
  const uint8_t* part = unpacking == Unpacking::kSixBits ? group + within / 16 * 3 * kStep : group;
  const int byte = byte_of(part + in_part / 8 * kStep, column, in_part % 4);
  int code = in_part % 8 < 4 ? byte & 15 : byte >> 4;
  if (unpacking == Unpacking::kFiveBits) {
    code |= (byte_of(part + 4 * kStep, column, in_part % 4) >> in_part / 4 & 1) << 4;
  }
  if (unpacking == Unpacking::kSixBits) {
    code |= (byte_of(part + 2 * kStep, column, in_part % 4) >> in_part / 4 * 2 & 3) << 4;
  }
  if (unpacking == Unpacking::kE2m1) {
    const int magnitude = code & 7;
    const int value = magnitude < 4 ? magnitude : (magnitude % 2 == 0 ? 4 : 6) * (magnitude < 6 ? 1 : 2);
    return code < 8 ? value : -value;
  }
  return code - format.zero;
}

__global__ void __launch_bounds__(kThreads) embed_kernel(CodeEmbedding task) {
  const int64_t row = blockIdx.x;
  if (row >= *task.count) return;
  const int i = int(blockIdx.y * blockDim.x + threadIdx.x);
  if (i >= task.width) return;
  const int32_t id = task.token_ids[row];
  const auto* table = static_cast<const uint8_t*>(task.table);
  const int32_t* order = device_order(table);
  float value = 0.0f;
  if (id >= 0 && id < task.vocab) {
    const CodePanelView panel = device_panel(table, id / kPanel, task.width);
    const FormatTable::Entry& format = panel.entry();
    const int column = id % kPanel, group = i / kGroup, within = i % kGroup;
    const int part = format.parts == 2 ? within / 16 : 0;
    const ColumnTerms terms = terms_of(format, load_terms(panel, group, part, column));
    int code = code_of(format, panel.groups + int64_t(group) * format.group_bytes, column, within);
    if (format.correction == Correction::kZeroPoint) code -= int(terms.correction);
    value = float(code) * terms.scale;
    if (format.correction == Correction::kOffset) value += terms.correction;
  }
  task.out[row * task.width + (order == nullptr ? i : order[i])] = value * task.scale;
}

}  // namespace

void embed_codes(const CodeEmbedding& task) {
  const dim3 grid{unsigned(task.rows), unsigned(ceil_div(task.width, kThreads))};
  launch(embed_kernel, grid, kThreads, 0, task);
}

}  // namespace cadenza::cuda
