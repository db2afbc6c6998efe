// A row's filters (top-n-sigma, min-p, top-k, top-p) by one block, and the draw among what they leave.
//
// A filter leaves the values that are not below a floor. The floor of top-k and of top-p is the highest
// that leaves enough tokens or mass. It is found by halving an interval of values over the whole row
// until few values are within it, then by bisecting the bits of floats over these alone.
#pragma once

#include "cuda/sampling.h"

namespace cadenza::cuda {

// Values that are searched in shared memory, with their measures.
constexpr int kListed = 3072;
// Steps of the search that halve an interval of values, in place of one of their bits.
constexpr int kHalvings = 8;
// First floor tried, as a distance below the largest value; most are above it.
constexpr float kFirstStep = 8.0f;

// The shared memory of a block that filters.
struct FilterMemory {
  uint64_t partials[kRowThreads / kWarp];
  int num_listed;
  uint64_t measures[kListed];
  float values[kListed];
};

// Of a value: that it is one.
struct CountMeasure {
  __device__ uint64_t operator()(float) const { return 1; }
};
// Of a value: its probability's ratio to that of the largest.
struct MassMeasure {
  float largest;
  __device__ uint64_t operator()(float value) const { return in_units(exp_of(value - largest)); }
};

class RowFilters {
 public:
  __device__ RowFilters(const float* values, int vocab, float largest, FilterMemory& memory)
      : values_(values), vocab_(vocab), largest_(largest), memory_(memory) {}

  __device__ void apply(const Settings& settings) {
    if (settings.top_n_sigma > 0.0f) raise(largest_ - settings.top_n_sigma * deviation());
    if (settings.min_p > 0.0f) raise(largest_ + log_of(settings.min_p));
    if (settings.top_k > 0) {
      keep_reaching(CountMeasure{}, [&](uint64_t) { return uint64_t(settings.top_k); });
    }
    if (settings.top_p < 1.0f) {
      keep_reaching(MassMeasure{largest_}, [&](uint64_t all) {
        return uint64_t(ceil(double(settings.top_p) * double(all)));
      });
    }
  }

  // The key of the token drawn.
  __device__ uint64_t draw(const Settings& settings) const {
    uint64_t best = 0;
    for_each([&](float value, int id) {
      if (value >= floor_) best = Larger{}(best, drawn_key(value, id, settings));
    });
    return block_merge<Larger>(best, memory_.partials);
  }

 private:
  // The set of values from `low` on reaches what is wanted, that from `high` on does not. `above` is
  // the measure of the latter, `count` the number of values between.
  struct Interval {
    float low, high;
    uint64_t above, count;
    __device__ bool is_open() const { return ordered_bits(high) - ordered_bits(low) > 1; }
  };

  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll 8
    for (int i = int(threadIdx.x); i < vocab_; i += int(blockDim.x)) body(values_[i], i);
  }
  template <class Term>
  __device__ uint64_t sum_of(const Term& term) const {
    uint64_t sum = 0;
    for_each([&](float value, int) { sum += term(value); });
    return block_merge<Sum>(sum, memory_.partials);
  }
  template <class Measure>
  __device__ uint64_t sum_from(float floor, const Measure& measure) const {
    return sum_of([&](float value) { return value >= floor ? measure(value) : 0; });
  }

  __device__ void raise(float floor) { floor_ = floor > floor_ ? floor : floor_; }

  __device__ float smallest() const {
    uint32_t least = ordered_bits(largest_);
    for_each([&](float value, int) {
      if (value >= floor_) least = Smaller{}(least, ordered_bits(value));
    });
    return from_ordered(uint32_t(block_merge<Smaller>(uint64_t(least), memory_.partials)));
  }

  // The standard deviation of the candidates' values. Distances from the largest are divided by the
  // furthest, so that their squares cannot overflow.
  __device__ float deviation() const {
    const float furthest = largest_ - smallest();
    if (!(furthest > 0.0f)) return 0.0f;
    if (furthest > -kLowest) return __builtin_inff();
    const double count = double(sum_from(floor_, CountMeasure{}));
    const double unit = 0x1p-40 / count;
    auto distance = [&](float value) { return (largest_ - value) / furthest; };
    const float mean = float(double(sum_from(floor_, [&](float v) { return in_units(distance(v)); })) * unit);
    const float variance = float(double(sum_from(floor_, [&](float value) {
                                   const float from_mean = distance(value) - mean;
                                   return in_units(from_mean * from_mean);
                                 })) * unit);
    return furthest * sqrtf(variance);
  }

  // Raises the floor to the highest from which on values reach what is wanted of the measure of all.
  template <class Measure, class Wanted>
  __device__ void keep_reaching(const Measure& measure, const Wanted& wanted_of) {
    uint32_t least = ordered_bits(largest_);
    uint64_t all = 0, count = 0;
    for_each([&](float value, int) {
      if (!(value >= floor_)) return;
      least = Smaller{}(least, ordered_bits(value));
      all += measure(value);
      count++;
    });
    least = block_merge<Smaller>(uint64_t(least), memory_.partials);
    const uint64_t wanted = wanted_of(block_merge<Sum>(all, memory_.partials));
    Interval interval{from_ordered(least), from_ordered(ordered_bits(largest_) + 1), 0,
                      block_merge<Sum>(count, memory_.partials)};
    for (int step = 0; interval.count > kListed && interval.is_open(); step++) {
      halve(interval, middle_of(interval, step), wanted, measure);
    }
    if (interval.is_open()) bisect_listed(interval, wanted, measure);
    floor_ = interval.low;
  }

  __device__ float middle_of(const Interval& interval, int step) const {
    const float half = step == 0 ? largest_ - kFirstStep
                                 : interval.low + 0.5f * (interval.high - interval.low);
    if (step < kHalvings && half > interval.low && half < interval.high) return half;
    const uint32_t low = ordered_bits(interval.low);
    return from_ordered(low + (ordered_bits(interval.high) - low) / 2);
  }

  template <class Measure>
  __device__ void halve(Interval& interval, float middle, uint64_t wanted, const Measure& measure) const {
    auto is_within = [&](float value) { return value >= middle && value < interval.high; };
    uint64_t reached = 0, count = 0;
    for_each([&](float value, int) {
      if (!is_within(value)) return;
      reached += measure(value);
      count++;
    });
    reached = interval.above + block_merge<Sum>(reached, memory_.partials);
    count = block_merge<Sum>(count, memory_.partials);
    if (reached >= wanted) {
      interval.low = middle;
      interval.count = count;
    } else {
      interval.high = middle;
      interval.above = reached;
      interval.count -= count;
    }
  }

  // Lists the values of an interval, in any order: sums of their measures are exact.
  template <class Measure>
  __device__ void list(const Interval& interval, const Measure& measure) {
    if (threadIdx.x == 0) memory_.num_listed = 0;
    __syncthreads();
    for_each([&](float value, int) {
      if (!(value >= interval.low && value < interval.high)) return;
      const int at = atomicAdd(&memory_.num_listed, 1);
      memory_.values[at] = value;
      memory_.measures[at] = measure(value);
    });
    __syncthreads();
  }

  template <class Measure>
  __device__ void bisect_listed(Interval& interval, uint64_t wanted, const Measure& measure) {
    list(interval, measure);
    const int listed = memory_.num_listed;
    while (interval.is_open()) {
      const float middle = middle_of(interval, kHalvings);
      uint64_t reached = 0;
      for (int i = int(threadIdx.x); i < listed; i += int(blockDim.x)) {
        if (memory_.values[i] >= middle) reached += memory_.measures[i];
      }
      if (interval.above + block_merge<Sum>(reached, memory_.partials) >= wanted) {
        interval.low = middle;
      } else {
        interval.high = middle;
      }
    }
  }

  const float* values_;
  const int vocab_;
  const float largest_;
  FilterMemory& memory_;
  float floor_ = kLowest;
};

}  // namespace cadenza::cuda
