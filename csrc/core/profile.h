// Where a step's time goes: calls, nanoseconds and bytes of each operation, counted on demand.
//
// Off, an operation pays one relaxed load. Bytes are what the operation must read at least once;
// what it reads again from a cache is not counted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace cadenza {

enum class Op : int {
  kEmbed,
  kRmsNorm,
  kRmsNormAdd,
  kLinear,
  kGatedLinear,
  kRopeAppendAttend,
  kTakeRows,
  kNextToken,
  kRouteExperts,
  kGroupedGatedLinear,
  kGroupedLinear,
};
constexpr int kNumOps = static_cast<int>(Op::kGroupedLinear) + 1;

struct OpTotals {
  const char* name;
  int64_t calls, nanoseconds, bytes;
};

// Sets every total to zero and begins to count.
void profile_start();
void profile_stop();
OpTotals profile_totals(Op op);

extern std::atomic<bool> profile_is_on;
void profile_add(Op op, int64_t nanoseconds, int64_t bytes);

// Counts one call, from its construction to its destruction.
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
