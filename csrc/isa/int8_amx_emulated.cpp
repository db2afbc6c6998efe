// The integer kernels of `amx` over the model of tile instructions, for tests: never in a wheel.
// Vectors are those of the first integer set that is compiled, and tiles multiply all rows.
#define CADENZA_ISA int8_amx_emulated
#define CADENZA_EMULATED_TILES
#if defined(__AVX512VNNI__)
#define CADENZA_VEC_AVX512
#elif defined(__AVX2__)
#define CADENZA_VEC_AVX2
#elif defined(__aarch64__)
#define CADENZA_VEC_NEON
#endif
#include "kernels/tile_choice.h"

namespace cadenza {
extern const IntegerKernels int8_amx_emulated_kernels;
const IntegerKernels int8_amx_emulated_kernels =
    int8_amx_emulated::make_tile_integer_kernels("amx_emulated");

namespace tests {

std::vector<int> measured_tile_rows();
std::vector<int> measured_tile_rows() {
  const int8_amx_emulated::LeastTileRows least = int8_amx_emulated::measured_least_rows();
  return {std::begin(least.of_formats), std::end(least.of_formats)};
}

int stated_tile_rows(const std::string& text);
int stated_tile_rows(const std::string& text) {
  return int8_amx_emulated::stated_least_rows(text).of_formats[kNumCodeFormats - 1];
}

}  // namespace tests
}  // namespace cadenza
