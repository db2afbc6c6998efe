// Tile registers: eight matrices of up to 16 rows of 64 bytes, and products of two of them, by AMX
// instructions or, with CADENZA_EMULATED_TILES, by a model of them for tests.
//
// A is rows of activations, 32 elements of bf16 (or 64 codes) a row. B has a row for each pair of
// elements of the reduction (or four codes), of 16 columns. C is 16 columns of f32 or int32 for each
// row of A. A product needs equal rows in C and A, equal row bytes in C and B, and as many rows of B
// as A's rows have words of 4 bytes. How many rows A has changes no bits of a row.
//
// The arithmetic of tile_dot_bf16, by Intel's manual, in each row and column: one chain of fused
// multiply-adds over the even elements of A's row and one over the odd ones, both ascending from
// zero, then c + (even + odd); rounded to nearest even, denormals flushed before and after. Those of
// codes are exact in int32 and wrap.
#pragma once

#include <cstring>

#include "core/tiles.h"
#include "vec/vec.h"

namespace cadenza::CADENZA_ISA {

constexpr int kTiles = 8, kTileRows = 16, kTileRowBytes = 64;
// Elements of bf16 that one product reduces.
constexpr int kTileDepth = kTileRowBytes / int(sizeof(bf16));

}  // namespace cadenza::CADENZA_ISA

#ifdef CADENZA_EMULATED_TILES
#include "vec/tile_model.h"
#else

namespace cadenza::CADENZA_ISA {

// By assembly, not by intrinsics: those of g++ 12 do not tell the compiler that a load reads memory,
// and need literals as tile numbers.
inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}
inline void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int N>
[[gnu::always_inline]] inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(N));
}
// Reads the tile's rows, `stride` bytes apart.
template <int N>
[[gnu::always_inline]] inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
[[gnu::always_inline]] inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(N) : "memory");
}
template <int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// Codes with sign, in A and in B.
template <int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot_codes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace cadenza::CADENZA_ISA

#endif

namespace cadenza::CADENZA_ISA {

// Loads a configuration, which zeroes the registers, unless this thread has it: then the registers
// keep what they hold.
inline void tile_configure(const TileConfig& config) {
  ThreadTiles& mine = thread_tiles();
  if (mine.release == tile_release && std::memcmp(&mine.config, &config, sizeof(config)) == 0) {
    return;
  }
  release_tiles();
  load_tile_config(config);
  mine = {config, tile_release};
}

}  // namespace cadenza::CADENZA_ISA
