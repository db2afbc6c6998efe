#include "core/profile.h"

#include <iterator>

namespace cadenza {

std::atomic<bool> profile_is_on{false};

namespace {

struct Counter {
  const char* name;
  std::atomic<int64_t> calls{0}, nanoseconds{0}, bytes{0};
};

// In the order of `Op`.
Counter counters[] = {
#define OPERATION(name, parameters) {#name},
#include "core/operation_list.h"
};

Counter& counter_of(Op op) { return counters[static_cast<int>(op)]; }

}  // namespace

const int kNumOps = int(std::size(counters));

void profile_start() {
  for (Counter& counter : counters) {
    counter.calls.store(0);
    counter.nanoseconds.store(0);
    counter.bytes.store(0);
  }
  profile_is_on.store(true);
}

void profile_stop() { profile_is_on.store(false); }

OpTotals profile_totals(Op op) {
  const Counter& counter = counter_of(op);
  return {counter.name, counter.calls.load(), counter.nanoseconds.load(), counter.bytes.load()};
}

void profile_add(Op op, int64_t nanoseconds, int64_t bytes) {
  Counter& counter = counter_of(op);
  counter.calls.fetch_add(1, std::memory_order_relaxed);
  counter.nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
  counter.bytes.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace cadenza
