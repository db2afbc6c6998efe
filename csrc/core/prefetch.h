// Prefetching the next weight matrix across operations.
//
// Every step reads the same weights in the same order. While a thread multiplies the last panel of
// its share, or waits, it prefetches the start of its share of the next weight, so that memory is
// not idle between two products. A wrong prediction costs bandwidth and cannot change a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

namespace cadenza {

constexpr int64_t kCacheLine = 64;

// The memory of a packed weight; threads take consecutive panels.
struct Weight {
  const char* data = nullptr;
  int64_t panels = 0, panel_bytes = 0;
};

// The part of a thread's prefetch that is still to be issued.
struct PrefetchRange {
  const char* at = nullptr;
  const char* end = nullptr;

  bool empty() const { return at >= end; }
  // Prefetches one line into L2; L1 is left to the running kernel.
  void prefetch_line() {
    __builtin_prefetch(at, 0, 2);
    at += kCacheLine;
  }
};

// Maximum bytes prefetched per thread, so that they fit the core's L2 cache.
constexpr int64_t kMaxPrefetchBytes = 1 << 18;

// The start of the share of `weight` that thread `index` of `threads` reads.
inline PrefetchRange prefetch_range(const Weight& weight, int index, int threads) {
  const char* begin = weight.data + weight.panels * index / threads * weight.panel_bytes;
  const char* end = weight.data + weight.panels * (index + 1) / threads * weight.panel_bytes;
  return {begin, std::min(end, begin + kMaxPrefetchBytes)};
}

// The blocks of KV that the next layer's attention reads, which lie one layer behind those that this
// layer's read. A thread records what it read and prefetches what follows while it multiplies, in
// products of several row tiles, which leave memory idle.
class UpcomingBlocks {
 public:
  static constexpr int64_t kChunk = 512;

  // Called by each unit of attention: forgets the blocks of another layer.
  void start(int64_t layer, int64_t block_bytes) {
    if (layer == layer_) return;
    layer_ = layer;
    block_bytes_ = block_bytes;
    count_ = next_ = taken_ = 0;
  }
  void record(const void* block) {
    if (count_ < kMaxBlocks) blocks_[count_++] = static_cast<const char*>(block);
  }
  // The next chunk to prefetch; if none is left, an address that is in the cache. The last chunk of
  // a block whose size is no multiple of a chunk overlaps the one before.
  const char* take_chunk() {
    if (next_ == count_) return reinterpret_cast<const char*>(blocks_);
    const int64_t last = std::max<int64_t>(0, block_bytes_ - kChunk);
    const char* chunk = blocks_[next_] + std::min(taken_, last);
    taken_ += kChunk;
    if (taken_ >= block_bytes_) taken_ = 0, next_++;
    return chunk;
  }

 private:
  static constexpr int kMaxBlocks = 1 << 10;
  const char* blocks_[kMaxBlocks];
  int count_ = 0, next_ = 0;
  int64_t layer_ = -1, block_bytes_ = 0, taken_ = 0;
};

class NextWeightPredictor {
 public:
  // Records that `weight` is read now; returns the weight that followed it last time, or an empty
  // one.
  Weight record_and_predict(const Weight& weight) {
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
