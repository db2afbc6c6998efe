// C entry points for measurements: the roofline and the profile counters.
#include "core/isa.h"
#include "core/profile.h"
#include "core/roofline.h"

#define CADENZA_EXPORT __attribute__((visibility("default")))

namespace {

cadenza::Runtime runtime() {
  return {cadenza::kernels(), cadenza::integer_kernels(), cadenza::executor()};
}

}  // namespace

extern "C" {

// Bytes per second; `data` must be 64-byte aligned and much larger than all caches together.
CADENZA_EXPORT double cadenza_measure_read(const void* data, int64_t bytes, int repeats) {
  return cadenza::measure_read(runtime(), data, bytes, repeats);
}

// Operations per second of the dots of int8 codes.
CADENZA_EXPORT double cadenza_measure_multiply_codes(int repeats) {
  return cadenza::measure_multiply_codes(runtime(), repeats);
}

// FLOP/s in bf16 (0) or f32 (1).
CADENZA_EXPORT double cadenza_measure_multiply(int dtype, int repeats) {
  return cadenza::measure_multiply(runtime(), static_cast<cadenza::DType>(dtype), repeats);
}

CADENZA_EXPORT void cadenza_profile_start() { cadenza::profile_start(); }

CADENZA_EXPORT void cadenza_profile_stop() { cadenza::profile_stop(); }

CADENZA_EXPORT int cadenza_profile_num_ops() { return cadenza::kNumOps; }

// Returns the operation's name and writes its calls, nanoseconds and bytes to totals[0..2].
CADENZA_EXPORT const char* cadenza_profile_read(int op, int64_t* totals) {
  cadenza::OpTotals found = cadenza::profile_totals(static_cast<cadenza::Op>(op));
  totals[0] = found.calls;
  totals[1] = found.nanoseconds;
  totals[2] = found.bytes;
  return found.name;
}

}  // extern "C"
