// What a thread has arranged of a job's input, for a kernel that reads it in another layout: kept for
// the thread's later claims of units of the same job.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"

namespace cadenza {

class ArrangedInputs {
 public:
  // At the start of each job.
  void forget() {
    entries_.clear();
    last_ = 0;
    bytes_ = 0;
    arena_.reset();
  }
  // The arrangement of `count` rows from an address on; null if there is none.
  char* find(const void* rows, int64_t count) {
    for (size_t i = 0; i < entries_.size(); i++) {
      const size_t at = (last_ + i) % entries_.size();
      if (entries_[at].rows != rows || entries_[at].count != count) continue;
      last_ = at + 1;  // claims read their inputs in the same order
      return entries_[at].data;
    }
    return nullptr;
  }
  // Memory for an arrangement that is kept; null if it is too large. Forgets the earlier ones where all
  // would be too much: claims go on to later rows.
  char* add(const void* rows, int64_t count, int64_t bytes) {
    if (bytes > kMaxBytes) return nullptr;
    if (bytes_ + bytes > kMaxBytes) forget();
    bytes_ += bytes;
    entries_.push_back({rows, count, arena_.take<char>(bytes)});
    return entries_.back().data;
  }

 private:
  static constexpr int64_t kMaxBytes = 1 << 22;
  struct Entry {
    const void* rows;
    int64_t count;
    char* data;
  };
  std::vector<Entry> entries_;
  size_t last_ = 0;
  int64_t bytes_ = 0;
  Arena arena_;
};

}  // namespace cadenza
