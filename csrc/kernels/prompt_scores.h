// Scores of the keys of a prompt by one query: the weights of attention, averaged over the kPool keys
// around each, and the largest of all heads and layers. Kernels of a row's keys, in spans of 512.
//
// A span's weights are computed as attention computes them, with a maximum and a sum of its own; the
// spans' sums are added in ascending order. A key's average is a sum of kPool terms in ascending order,
// of which those outside the prompt are 0; the division is left to the end, since it keeps the order of
// sizes. The largest is that of bits as unsigned integers: no weight is negative, and NaN is larger
// than any number.
#pragma once

#include "kernels/attention.h"

namespace cadenza::CADENZA_ISA {

constexpr int kHalfPool = kPool / 2;
static_assert(kPool % 2 == 1 && kHalfPool <= kLanes, "what a pool takes of a neighbour is a sub-block");

inline Vec larger(Vec a, Vec b) { return as_float(max_u(as_int(a), as_int(b))); }

// Prefetches the next span's first keys while the last ones of this span are read.
template <class Kv>
inline void announce_next(AttendTile<Kv>& tile, int64_t span, int64_t length) {
  for (int i = 0; i < kAttendVecs; i++) {
    const int64_t position = (span + 1) * kSpan + i * kLanes;
    if (position >= length) break;
    const int64_t at = offset_of_position<Kv>(tile.task, tile.unit, position);
    tile.blocks[tile.num_blocks + i] = block_at<Kv>(tile.task.k_pool, at);
  }
}

// A unit is a span of a KV head, whose query heads share the keys: weights that are not normalised,
// their maximum and their sum. What lies behind the prompt in its last sub-block gets 0.
template <class Kv>
void weigh_key_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& plan = *static_cast<const ScorePlan*>(context);
  const AttendTask& task = *plan.attend;
  const int64_t length = task.kv_lens[plan.row], group = task.group();
  const int64_t last = task.query_starts[plan.row + 1] - task.query_starts[plan.row] - 1;
  for (int64_t u = begin; u < end; u++) {
    const int64_t kv_head = u / plan.num_spans, span = u % plan.num_spans;
    const AttendUnit unit{int32_t(plan.row), int32_t(kv_head),  int32_t(last), int32_t(last + 1),
                          int32_t(span),     int32_t(span + 1), -1};
    worker.arena.reset();
    AttendTile<Kv> tile{task, unit, worker.arena};
    for (auto& next : tile.next) next = static_cast<const typename Kv::Stored*>(task.k_pool);
    for (int64_t first = 0; first < group; first += kTileQueries<Kv>) {
      tile.first = last * group + first;
      tile.count = int(std::min<int64_t>(kTileQueries<Kv>, group - first));
      for (int i = 0; i < tile.count; i++) prepare_query(tile, i);
      const TokenRange keys = enter_span(tile, span);
      announce_next(tile, span, length);
      QueryCount<Kv>::with(tile.count, [&](auto count) { score_span(count, tile, keys); });
      for (int i = 0; i < tile.count; i++) {
        const int64_t head = tile.head(i);
        float* weights = plan.weights_of(head) + span * kSpan;
        softmax_span(tile, i, [&](int block, Vec p) { store(weights + block * kLanes, p); });
        plan.maxima_of(head)[span] = tile.maximum[i];
        plan.sums_of(head)[span] = tile.denominator[i];
      }
    }
  }
}

// A unit is a query head: what each span's weights are multiplied by, in place of its sum.
inline void normalise_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& plan = *static_cast<const ScorePlan*>(context);
  for (int64_t head = begin; head < end; head++) {
    const float* maxima = plan.maxima_of(head);
    float *sums = plan.sums_of(head), highest = maxima[0], total = 0;
    for (int64_t s = 1; s < plan.num_spans; s++) highest = std::max(highest, maxima[s]);
    for (int64_t s = 0; s < plan.num_spans; s += kLanes) {
      alignas(64) float scales[kLanes];
      store(scales, exp2_vec(sub(load(maxima + s), set1(highest))));
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, plan.num_spans - s); i++) {
        total += sums[s + i] * scales[i];
        sums[s + i] = scales[i];
      }
    }
    for (int64_t s = 0; s < plan.num_spans; s++) sums[s] /= total;
  }
}

// Writes the normalised weights of `count` sub-blocks of a span.
inline void copy_weights(const ScorePlan& plan, int64_t head, int64_t position, int count, float* to) {
  const Vec factor = set1(plan.sums_of(head)[position / kSpan]);
  const float* from = plan.weights_of(head) + position;
  for (int i = 0; i < count * kLanes; i += kLanes) store(to + i, mul(load(from + i), factor));
}

// Adds to `largest` the pooled weights of one head, for `count` sub-blocks from `position` on.
inline void pool_head(const ScorePlan& plan, int64_t head, int64_t position, int count, float* largest) {
  alignas(64) float weights[kSpan + 2 * kLanes];
  const int64_t behind = position + count * kLanes;
  store(weights, zero());
  store(weights + (count + 1) * kLanes, zero());
  if (position > 0) copy_weights(plan, head, position - kLanes, 1, weights);
  copy_weights(plan, head, position, count, weights + kLanes);
  if (behind < plan.length()) copy_weights(plan, head, behind, 1, weights + (count + 1) * kLanes);
  for (int i = 0; i < count * kLanes; i += kLanes) {
    const float* around = weights + kLanes + i - kHalfPool;
    Vec sum = load(around);
    for (int j = 1; j < kPool; j++) sum = add(sum, load(around + j));
    store(largest + i, larger(load(largest + i), sum));
  }
}

// A unit is a span: the largest pooled weights of all heads, and of the layers before.
inline void pool_weight_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& plan = *static_cast<const ScorePlan*>(context);
  const ScoreTask& task = *plan.task;
  const Vec divisor = set1(float(kPool));
  for (int64_t span = begin; span < end; span++) {
    const int64_t position = span * kSpan;
    const int count = int(ceil_div(std::min<int64_t>(plan.length() - position, kSpan), kLanes));
    float* best = task.best + plan.row * task.stride + position;
    for (int i = 0; task.is_first && i < count * kLanes; i += kLanes) store(best + i, zero());
    for (int64_t head = 0; head < plan.attend->heads; head++) pool_head(plan, head, position, count, best);
    if (!task.is_last) continue;
    float* sums = task.sums + plan.row * task.stride + position;
    for (int i = 0; i < count * kLanes; i += kLanes) {
      const Vec score = div(load(best + i), divisor);
      store(sums + i, plan.begins ? score : add(load(sums + i), score));
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
