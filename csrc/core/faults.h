// Faults that `cadenza verify --self-test` injects to show that the gate catches them.
//
// Only a library that is compiled with CADENZA_FAULTS has them, and no shipped one is. Without the
// flag the kernels' machine code is what it would be without any of this: `if constexpr (kHasFaults)`
// in a template leaves nothing of what it guards.
#pragma once

#include <cstdint>

#ifdef CADENZA_FAULTS
#include <atomic>
#endif

namespace cadenza {

// The values are known to backends/xla/mutants.py.
enum class Fault : int32_t {
  kNone = 0,
  kRelativeSpans = 1,      // spans are counted from a step's first query, not from position 0
  kNeighbourPage = 2,      // a row's second sixteen keys and values are another row's
  kNeighbourPagesFar = 3,  // all from position 640 on are another row's
  kRowKey = 4,             // a draw's key is the index of its logit row
  kMultipliedPadding = 5,  // lanes outside a row's range are multiplied by zero, not left out
};

#ifdef CADENZA_FAULTS
constexpr bool kHasFaults = true;
extern std::atomic<Fault> injected_fault;  // set between steps
inline bool has_fault(Fault fault) {
  return injected_fault.load(std::memory_order_relaxed) == fault;
}
#else
constexpr bool kHasFaults = false;
constexpr bool has_fault(Fault) { return false; }
#endif

}  // namespace cadenza
