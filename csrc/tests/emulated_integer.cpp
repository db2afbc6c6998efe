// The kernels of quantised products by tile registers over the model of the tiles, so that machines
// without tiles test everything but the instructions. Vectors are those of avx512_vnni if it is
// built, else plain C++.
#define CADENZA_ISA emulated_integer
#define CADENZA_EMULATED_TILES
#ifdef __AVX512VNNI__
#define CADENZA_VEC_AVX512
#endif
#include "kernels/tile_choice.h"

namespace cadenza::tests {

extern const IntegerKernels emulated_tile_kernels;
const IntegerKernels emulated_tile_kernels =
    emulated_integer::make_tile_integer_kernels("emulated tiles");

std::vector<int> measured_tile_rows();
std::vector<int> measured_tile_rows() {
  const emulated_integer::LeastTileRows least = emulated_integer::measured_least_rows();
  return {std::begin(least.of_formats), std::end(least.of_formats)};
}

int stated_tile_rows(const std::string& text);
int stated_tile_rows(const std::string& text) {
  return emulated_integer::stated_least_rows(text).of_formats[kNumCodeFormats - 1];
}

}  // namespace cadenza::tests
