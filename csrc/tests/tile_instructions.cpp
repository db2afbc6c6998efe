// Products of two tiles by the CPU's instructions, which tests compare with their model.
#define CADENZA_ISA tile_instructions
#include "tests/tile_instructions.h"

#if defined(__x86_64__) && __has_include(<amxtileintrin.h>)
#include "vec/tile.h"

namespace cadenza::tests {

using namespace tile_instructions;

void tile_products_by_instructions(const TileOperands& tiles, float* out_bf16, int32_t* out_codes) {
  const int64_t columns = tiles.config.row_bytes[0], depth = tiles.config.row_bytes[1];
  tile_configure(tiles.config);
  tile_load<1>(tiles.a, depth);
  tile_load<2>(tiles.b, columns);
  tile_load<0>(tiles.c, columns);
  tile_dot_bf16<0, 1, 2>();
  tile_store<0>(out_bf16, columns);
  tile_load<0>(tiles.c, columns);
  tile_dot_codes<0, 1, 2>();
  tile_store<0>(out_codes, columns);
  release_tiles();
}

}  // namespace cadenza::tests

#else

namespace cadenza::tests {

void tile_products_by_instructions(const TileOperands&, float*, int32_t*) {}

}  // namespace cadenza::tests

#endif
