// Which weight is read after which, so that its first part can be on its way in time.
//
// A step multiplies by the same weights in the same order every time. While a thread works on the
// last panel of one, or waits, it fetches what it will read of the next: otherwise the memory
// would idle between two products, and each would begin with a wait. A wrong guess costs some
// bandwidth and can change no result, for nothing is read but by prefetch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

namespace cadenza {

constexpr int64_t kCacheLine = 64;

// A packed weight as memory: panels that threads share out in order.
struct Weight {
  const char* data = nullptr;
  int64_t panels = 0, panel_bytes = 0;
};

// Memory that one thread will read, as far as it has not been fetched.
struct Upcoming {
  const char* at = nullptr;
  const char* end = nullptr;

  bool empty() const { return at >= end; }
  // Into the second-level cache: the first belongs to the work at hand.
  void fetch_line() {
    __builtin_prefetch(at, 0, 2);
    at += kCacheLine;
  }
};

// At most this much of a thread's share is fetched early, so that it stays in its own cache.
constexpr int64_t kMaxUpcoming = 1 << 18;

// What thread `index` of `threads` will read first of a weight.
inline Upcoming upcoming_for(const Weight& weight, int index, int threads) {
  const char* begin = weight.data + weight.panels * index / threads * weight.panel_bytes;
  const char* end = weight.data + weight.panels * (index + 1) / threads * weight.panel_bytes;
  return {begin, std::min(end, begin + kMaxUpcoming)};
}

class WeightTrail {
 public:
  // Notes that `weight` is read now; returns the one that was read after it the last time, or
  // nothing.
  Weight advance(const Weight& weight) {
    if (after_.size() >= kMaxWeights) after_.clear();
    if (last_ != nullptr) after_[last_] = weight;
    last_ = weight.data;
    auto found = after_.find(weight.data);
    return found == after_.end() ? Weight{} : found->second;
  }

 private:
  static constexpr size_t kMaxWeights = 1 << 14;
  std::unordered_map<const void*, Weight> after_;
  const void* last_ = nullptr;
};

}  // namespace cadenza
