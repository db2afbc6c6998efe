// A model of the tile registers and of their instructions, for tests on machines without them: it
// computes the same bits and throws TileFault where an instruction would fault. Included by
// vec/tile.h, which defines the operations.
#pragma once

#include <stdexcept>

#include "core/pool.h"

namespace cadenza::CADENZA_ISA {

// What would be an invalid-opcode or a general-protection exception.
struct TileFault : std::logic_error {
  using std::logic_error::logic_error;
};
inline void tile_require(bool holds, const char* rule) {
  if (!holds) throw TileFault(rule);
}

struct TileModel {
  struct Register {
    int rows, row_bytes;  // both 0: not configured
    alignas(64) uint8_t data[kTileRows][kTileRowBytes];
  };
  bool is_configured;
  Register registers[kTiles];
};
inline TileModel& tile_model() {
  static thread_local TileModel model{};
  return model;
}

inline void tile_release() { tile_model() = {}; }

inline void load_tile_config(const TileConfig& config) {
  TileModel& model = tile_model();
  tile_require(config.palette <= 1, "LDTILECFG: palette 0 or 1");
  for (uint8_t byte : config.reserved) tile_require(byte == 0, "LDTILECFG: reserved bytes are 0");
  tile_require(config.start_row == 0, "LDTILECFG: this code starts at row 0");
  model = {};
  model.is_configured = config.palette == 1;
  for (int n = 0; n < 16; n++) {
    const int rows = config.rows[n], bytes = config.row_bytes[n];
    tile_require(n < kTiles || (rows == 0 && bytes == 0), "LDTILECFG: there are 8 tiles");
    tile_require(rows <= kTileRows && bytes <= kTileRowBytes, "LDTILECFG: at most 16 x 64 bytes");
    tile_require((rows == 0) == (bytes == 0), "LDTILECFG: rows without bytes, or bytes without rows");
    if (n < kTiles) model.registers[n].rows = rows, model.registers[n].row_bytes = bytes;
  }
}

inline TileModel::Register& tile_at(int n) {
  TileModel& model = tile_model();
  tile_require(model.is_configured, "no tile configuration is loaded");
  tile_require(model.registers[n].rows > 0, "a tile that is not configured");
  return model.registers[n];
}

template <int N>
inline void tile_zero() {
  std::memset(tile_at(N).data, 0, sizeof(tile_at(N).data));
}
template <int N>
inline void tile_load(const void* from, int64_t stride) {
  TileModel::Register& tile = tile_at(N);
  tile_zero<N>();
  for (int row = 0; row < tile.rows; row++) {
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride,
                size_t(tile.row_bytes));
  }
}
template <int N>
inline void tile_store(void* to, int64_t stride) {
  const TileModel::Register& tile = tile_at(N);
  for (int row = 0; row < tile.rows; row++) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], size_t(tile.row_bytes));
  }
}

// The operands of a product, whose shapes fit.
struct TileProductOperands {
  TileModel::Register& c;
  const TileModel::Register &a, &b;
  int depth;  // words of 4 bytes
};
template <int C, int A, int B>
inline TileProductOperands tile_operands() {
  static_assert(C != A && A != B && C != B, "the three tiles of a product differ");
  const TileProductOperands tiles{tile_at(C), tile_at(A), tile_at(B), tile_at(A).row_bytes / 4};
  for (int bytes : {tiles.c.row_bytes, tiles.a.row_bytes, tiles.b.row_bytes}) {
    tile_require(bytes % 4 == 0, "a product: rows of whole words");
  }
  tile_require(tiles.b.rows == tiles.depth, "a product: rows of B and words of A");
  tile_require(tiles.c.rows == tiles.a.rows, "a product: rows of C and A");
  tile_require(tiles.c.row_bytes == tiles.b.row_bytes, "a product: columns of C and B");
  return tiles;
}

template <int C, int A, int B>
inline void tile_dot_bf16() {
  const TileProductOperands tiles = tile_operands<C, A, B>();
  const uint64_t float_state = enter_float_state();
  for (int row = 0; row < tiles.c.rows; row++) {
    Vec even = zero(), odd = zero();
    for (int k = 0; k < tiles.depth; k++) {
      uint32_t pair;
      std::memcpy(&pair, tiles.a.data[row] + 4 * k, sizeof(pair));
      const VecI words = load_words(reinterpret_cast<const bf16*>(tiles.b.data[k]));
      const VecI high = set1_i(0xffff0000u);
      even = fma(as_float(set1_i(pair << 16)), as_float(shl<16>(words)), even);
      odd = fma(as_float(and_i(set1_i(pair), high)), as_float(and_i(words, high)), odd);
    }
    float* out = reinterpret_cast<float*>(tiles.c.data[row]);
    const int columns = tiles.c.row_bytes / 4;
    const Vec sum = add(load_n(out, columns), add(even, odd));
    store(out, zero());
    store_n(out, sum, columns);
  }
  leave_float_state(float_state);
}

// Four codes of each word.
template <int C, int A, int B>
inline void tile_dot_codes() {
  const TileProductOperands tiles = tile_operands<C, A, B>();
  for (int row = 0; row < tiles.c.rows; row++) {
    const auto* a = reinterpret_cast<const int8_t*>(tiles.a.data[row]);
    uint32_t sums[kTileRowBytes / 4];
    std::memcpy(sums, tiles.c.data[row], sizeof(sums));
    for (int k = 0; k < tiles.depth; k++) {
      const auto* b = reinterpret_cast<const int8_t*>(tiles.b.data[k]);
      for (int n = 0; n < tiles.c.row_bytes / 4; n++) {
        for (int i = 0; i < 4; i++) sums[n] += uint32_t(int(a[4 * k + i]) * int(b[4 * n + i]));
      }
    }
    std::memset(tiles.c.data[row], 0, kTileRowBytes);
    std::memcpy(tiles.c.data[row], sums, size_t(tiles.c.row_bytes));
  }
}

}  // namespace cadenza::CADENZA_ISA
