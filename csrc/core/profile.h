// Counters of calls, nanoseconds and bytes of each operation.
//
// While disabled, they cost an operation one relaxed load. Bytes count each byte that the operation
// must read once; repeated reads are not counted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace cadenza {

enum class Op : int {
#define OPERATION(name, parameters) name,
#include "core/operation_list.h"
};

extern const int kNumOps;

struct OpTotals {
  const char* name;
  int64_t calls, nanoseconds, bytes;
};

// Resets all totals and starts counting.
void profile_start();
void profile_stop();
OpTotals profile_totals(Op op);

extern std::atomic<bool> profile_is_on;
void profile_add(Op op, int64_t nanoseconds, int64_t bytes);

// Counts one call; its time is the lifetime of the scope.
class ProfileScope {
  using Clock = std::chrono::steady_clock;

 public:
  explicit ProfileScope(Op op) : op_(op), is_on_(profile_is_on.load(std::memory_order_relaxed)) {
    if (is_on_) start_ = Clock::now();
  }
  ~ProfileScope() {
    if (!is_on_) return;
    auto elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_);
    profile_add(op_, elapsed.count(), bytes_);
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

  bool is_on() const { return is_on_; }
  void reads(int64_t bytes) { bytes_ += bytes; }

 private:
  const Op op_;
  const bool is_on_;
  int64_t bytes_ = 0;
  Clock::time_point start_;
};

}  // namespace cadenza
