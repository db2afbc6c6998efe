#include "core/profile.h"

namespace cadenza {

std::atomic<bool> profile_is_on{false};

namespace {

struct Counter {
  const char* name;
  std::atomic<int64_t> calls{0}, nanoseconds{0}, bytes{0};
};

// In the order of `Op`.
Counter counters[kNumOps] = {{"embed"},
                             {"rms_norm"},
                             {"rms_norm_add"},
                             {"convert"},
                             {"linear"},
                             {"gated_linear"},
                             {"rope_append_attend"},
                             {"take_rows"},
                             {"next_token"},
                             {"route_experts"},
                             {"grouped_gated_linear"},
                             {"grouped_linear"},
                             {"gated_delta"},
                             {"short_conv"},
                             {"selective_scan"},
                             {"gate_inputs"},
                             {"layer_norm"},
                             {"activate"},
                             {"keep_heads"},
                             {"encode_attend"},
                             {"keep_rows"},
                             {"place_rows"},
                             {"score_keys"}};

Counter& counter_of(Op op) { return counters[static_cast<int>(op)]; }

}  // namespace

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
