// The causal depthwise convolution of layers with a state.
//
// Every token's sums are computed by themselves, the oldest input first, whether it is one of this step
// or of a slot; so tokens are parallel, and any cut of a prompt gives the same bits. The slots are
// written by a kernel behind it, since a row may keep the slot that it began with.
#pragma once

#include "cuda/math.h"
#include "cuda/state_rows.h"

namespace cadenza::cuda {

constexpr int kMostTaps = 8;
// Channels of a segment, which a warp convolves for one token.
constexpr int kMostSegment = 256;
constexpr int kPerLane = kMostSegment / kWarp;
constexpr unsigned kConvolveThreads = 128;
constexpr unsigned kKeepThreads = 128;

// T is the type of activations and of the pool.
template <class T>
struct DepthwiseConv {
  SlotRows slots;
  int channels, taps;
  const float* weight;  // [taps, channels], the oldest input first
  const float* bias;    // [channels], or null
  T* pool;              // [slots, layers, taps - 1, channels]: the newest inputs

  // The newest inputs before a row's tokens; null: zeros.
  __device__ T* held(int slot) const {
    return slot < 0 ? nullptr : pool + slots.place(slot, int64_t(taps - 1) * channels);
  }
};

struct Segment {
  int first, width;
};

// The sum of a channel's newest inputs by their weights, on top of the bias.
template <class T, class Channels>
__device__ __forceinline__ float convolved(const DepthwiseConv<T>& conv, const Channels& channels,
                                           const RowTokens& row, int token, int channel) {
  const T* held = conv.held(conv.slots.slot(conv.slots.initial[row.row]));
  float sum = conv.bias == nullptr ? 0.0f : conv.bias[channel];
  for (int tap = 0; tap < conv.taps; tap++) {
    const int from = token - conv.taps + 1 + tap, before = from - row.begin + conv.taps - 1;
    float input = 0.0f;
    if (from >= row.begin) {
      input = to_float(channels.input(from, channel));
    } else if (held != nullptr) {
      input = to_float(held[int64_t(before) * conv.channels + channel]);
    }
    sum = fmaf(input, conv.weight[int64_t(tap) * conv.channels + channel], sum);
  }
  return sum;
}

// A block row for each token, a warp for each segment. `Channels` says what a token's inputs are
// (`input`), how channels are divided (`num_segments`, `segment`), and what is done with sums
// (`finish`); a warp more computes what else a token needs (`prepare`).
template <class T, class Channels>
__global__ void __launch_bounds__(kConvolveThreads) convolve_kernel(const DepthwiseConv<T> conv,
                                                                    const Channels channels) {
  const int token = int(blockIdx.x), lane = int(threadIdx.x) % kWarp;
  const int index = int(blockIdx.y) * int(kConvolveThreads) / kWarp + int(threadIdx.x) / kWarp;
  if (token >= conv.slots.num_tokens() || index > channels.num_segments()) return;
  if (index == channels.num_segments()) return channels.prepare(token, lane);
  const Segment segment = channels.segment(index);
  const RowTokens row = row_of(conv.slots, token);
  float sums[kPerLane];
  for (int i = 0; i < kPerLane; i++) {
    const int channel = i * kWarp + lane;
    sums[i] = channel < segment.width ? convolved(conv, channels, row, token, segment.first + channel) : 0.0f;
  }
  channels.finish(token, index, lane, sums);
}

// Writes the newest inputs behind each token that keeps a slot. A block for each row with tokens and
// some channels.
template <class T, class Channels>
__global__ void __launch_bounds__(kKeepThreads) keep_inputs_kernel(const DepthwiseConv<T> conv,
                                                                   const Channels channels) {
  __shared__ T old[kMostTaps - 1][kKeepThreads];
  __shared__ int kept[kKeepThreads], num_kept;
  const int held = conv.taps - 1, own = int(threadIdx.x);
  const int channel = int(blockIdx.y) * int(kKeepThreads) + own;
  const bool has_channel = channel < conv.channels;
  const RowTokens row = nth_row(conv.slots, int(blockIdx.x));
  if (row.row < 0) return;
  const T* from = conv.held(conv.slots.slot(conv.slots.initial[row.row]));
  for (int i = 0; i < held && has_channel; i++) {
    old[i][own] = from == nullptr ? from_float<T>(0.0f) : from[int64_t(i) * conv.channels + channel];
  }
  for (int first = row.begin; first < row.end; first += int(kKeepThreads)) {
    if (own == 0) num_kept = 0;
    __syncthreads();
    const int token = first + own;
    if (token < row.end && conv.slots.slot(conv.slots.kept[token]) >= 0) kept[atomicAdd(&num_kept, 1)] = token;
    __syncthreads();
    for (int each = 0; each < num_kept && has_channel; each++) {
      T* to = conv.held(conv.slots.kept[kept[each]]);
      for (int i = 0; i < held; i++) {
        const int input = kept[each] - held + 1 + i, before = input - row.begin + held;
        to[int64_t(i) * conv.channels + channel] =
            input >= row.begin ? channels.input(input, channel) : old[before][own];
      }
    }
    __syncthreads();
  }
}

// Launches both.
template <class T, class Channels>
void convolve(const DepthwiseConv<T>& conv, const Channels& channels) {
  const int64_t per_block = kConvolveThreads / kWarp;
  const int64_t segments = channels.num_segments() + 1, rows = std::min(conv.slots.rows, conv.slots.tokens);
  launch(convolve_kernel<T, Channels>,
         dim3{unsigned(conv.slots.tokens), unsigned(ceil_div(segments, per_block))}, kConvolveThreads, 0,
         conv, channels);
  launch(keep_inputs_kernel<T, Channels>,
         dim3{unsigned(rows), unsigned(ceil_div(conv.channels, int64_t(kKeepThreads)))}, kKeepThreads, 0,
         conv, channels);
}

}  // namespace cadenza::cuda
