// Products of two tiles by the CPU's instructions. Only to be called where the CPU has them.
#pragma once

#include "core/tiles.h"

namespace cadenza::tests {

// C, A and B are tiles 0, 1 and 2 of the configuration, in memory row behind row.
struct TileOperands {
  const TileConfig& config;
  const void *c, *a, *b;
};

// C plus the product of A and B, as bf16 and as codes with sign.
void tile_products_by_instructions(const TileOperands& tiles, float* out_bf16, int32_t* out_codes);

}  // namespace cadenza::tests
