// The tile configuration of the calling thread (AMX on x86-64).
//
// A kernel loads the configuration that it needs. A worker releases it before it sleeps and a lease
// when it ends: tile registers in use add 8 KiB to each switch of a thread and to each signal frame.
#pragma once

#include <cstdint>

namespace cadenza {

// As LDTILECFG reads it: rows of each tile register, and the bytes of a row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int rows_, int row_bytes_) {
    rows[tile] = uint8_t(rows_);
    row_bytes[tile] = uint16_t(row_bytes_);
  }
};
static_assert(sizeof(TileConfig) == 64, "the operand of LDTILECFG");

// What this thread has loaded, and the instruction that releases it; null if nothing is loaded.
struct ThreadTiles {
  TileConfig config;
  void (*release)();
};
ThreadTiles& thread_tiles();

// Releases the calling thread's tile registers, if it has configured any.
void release_tiles();

}  // namespace cadenza
