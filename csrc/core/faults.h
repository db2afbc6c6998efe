// Faults that `cadenza verify --self-test` injects to show that the gate catches them.
//
// Only libraries compiled with CADENZA_FAULTS contain them; wheels are built without it. Without
// the flag `if constexpr (kHasFaults)` discards the guarded code, so machine code is unchanged.
#pragma once

#include <cstdint>

#ifdef CADENZA_FAULTS
#include <atomic>
#endif

namespace cadenza {

// Keep the values in sync with backends/xla/mutants.py.
enum class Fault : int32_t {
  kNone = 0,
  kRelativeSpans = 1,      // spans start at the step's first query, not at position 0
  kNeighbourPage = 2,      // positions 16 to 31 are read from another row's pages
  kNeighbourPagesFar = 3,  // positions from 640 on are read from another row's pages
  kRowKey = 4,             // the draw key is the logit row's index in the batch
  kMultipliedPadding = 5,  // lanes outside a row's range are multiplied by zero, not masked
  kSumsByRows = 6,         // GPU: a product of more than eight rows adds K's stages from the last on
  kSplitLibrary = 7,       // GPU: cublasLt's algorithms split K
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
