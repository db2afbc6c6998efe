// The model of tile instructions: its arithmetic, compared with the definition, and its checks.
#define CADENZA_ISA tile_test
#define CADENZA_EMULATED_TILES
#include "vec/tile.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "tests/check.h"
#include "tests/data.h"
#include "tests/tile_instructions.h"

namespace cadenza::tests {
namespace {

using namespace tile_test;

// C in tile 0, A in tile 1 and B in tile 2.
TileConfig config_of(int rows, int columns, int depth) {
  TileConfig config;
  config.set(0, rows, 4 * columns);
  config.set(1, rows, 4 * depth);
  config.set(2, depth, 4 * columns);
  return config;
}

float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// c + (even + odd) of one row and column; values are normal or zero.
float defined(float c, const bf16* a, const bf16* b, int depth, int columns) {
  float chains[2] = {0, 0};
  for (int i = 0; i < 2 * depth; i++) {
    chains[i % 2] = flushed(std::fmaf(widen(a[i]), widen(b[i / 2 * 2 * columns + i % 2]), chains[i % 2]));
  }
  return flushed(c + flushed(chains[0] + chains[1]));
}

// Values of which some, multiplied, are denormal.
std::vector<bf16> spread_values(Random& random, int64_t count) {
  std::vector<bf16> values;
  for (int64_t i = 0; i < count; i++) {
    bf16 value;
    set(value, std::ldexp(random.normal(), random.below(4) == 0 ? -60 - random.below(20) : 0));
    values.push_back(value);
  }
  return values;
}

TEST(a_tile_of_bf16_adds_an_even_and_an_odd_chain) {
  Random random(41);
  for (auto [rows, columns, depth] : {std::array{16, 16, 16}, {1, 16, 16}, {7, 5, 3}}) {
    tile_configure(config_of(rows, columns, depth));
    const std::vector<bf16> a = spread_values(random, rows * 2 * depth);
    const std::vector<bf16> b = spread_values(random, depth * 2 * columns);
    const std::vector<float> c = random_values<float>(random, rows * columns);
    std::vector<float> out(c.size());
    tile_load<0>(c.data(), 4 * columns);
    tile_load<1>(a.data(), 4 * depth);
    tile_load<2>(b.data(), 4 * columns);
    tile_dot_bf16<0, 1, 2>();
    tile_store<0>(out.data(), 4 * columns);
    for (int i = 0; i < rows * columns; i++) {
      const float expected =
          defined(c[size_t(i)], &a[size_t(i / columns * 2 * depth)],
                  &b[size_t(i % columns * 2)], depth, columns);
      CHECK(same_bits(&expected, &out[size_t(i)], 1));
    }
  }
  release_tiles();
}

TEST(a_tile_of_codes_is_exact) {
  Random random(42);
  const int rows = 5, columns = 16, depth = 16;
  tile_configure(config_of(rows, columns, depth));
  uint8_t a[rows * 4 * depth], b[depth * 4 * columns];
  for (uint8_t& code : a) code = uint8_t(random.below(256));
  for (uint8_t& code : b) code = uint8_t(random.below(256));
  int32_t sums[rows * columns];
  tile_load<1>(a, 4 * depth);
  tile_load<2>(b, 4 * columns);
  tile_zero<0>();
  tile_dot_codes<0, 1, 2>();
  tile_store<0>(sums, 4 * columns);
  for (int i = 0; i < rows * columns; i++) {
    int32_t expected = 0;
    for (int k = 0; k < 4 * depth; k++) {
      const uint8_t x = a[i / columns * 4 * depth + k];
      const uint8_t w = b[k / 4 * 4 * columns + i % columns * 4 + k % 4];
      expected += int8_t(x) * int8_t(w);
    }
    CHECK(sums[i] == expected);
  }
  release_tiles();
}

// Elements of any sign and size; `special` of 64 are infinite.
std::vector<bf16> any_values(Random& random, int64_t count, int special) {
  std::vector<bf16> values;
  for (int64_t i = 0; i < count; i++) {
    const bool is_infinite = random.below(64) < special;
    const uint32_t bits = random.next();
    values.push_back({uint16_t(is_infinite ? (bits & 0x8000) | 0x7f80 : bits & 0xbfff)});
  }
  return values;
}

// NaN of any sign and payload is equal: no stream goes on behind one.
void check_equal(const std::vector<float>& found, const std::vector<float>& expected) {
  for (size_t i = 0; i < found.size(); i++) {
    const bool are_nan = std::isnan(found[i]) && std::isnan(expected[i]);
    CHECK(are_nan || same_bits(&found[i], &expected[i], 1));
  }
}

// The tests of a machine without AMX are of the model; this one shows that the CPU does the same.
TEST(tile_instructions_have_the_bits_of_their_model) {
  if (std::string(context.kernels.isa) != "amx") {
    std::fprintf(stderr, "%s has no tile instructions to compare with\n", context.kernels.isa);
    return;
  }
  Random random(43);
  for (int round = 0; round < 400; round++) {
    const int rows = 1 + random.below(16), columns = 1 + random.below(16), depth = 1 + random.below(16);
    const TileConfig config = config_of(rows, columns, depth);
    const int special = round % 4 == 3 ? 1 : 0;
    const std::vector<bf16> a = any_values(random, rows * 2 * depth, special);
    const std::vector<bf16> b = any_values(random, depth * 2 * columns, special);
    std::vector<float> c;
    for (int i = 0; i < rows * columns; i++) {
      // Of all sizes, in every second round small beside denormal products.
      c.push_back(std::ldexp(random.normal(), round % 2 ? -120 - random.below(20) : random.below(200) - 120));
    }
    std::vector<float> found(c.size()), expected(c.size());
    std::vector<int32_t> codes(c.size()), expected_codes(c.size());
    tile_products_by_instructions({config, c.data(), a.data(), b.data()}, found.data(), codes.data());
    tile_configure(config);
    tile_load<1>(a.data(), 4 * depth);
    tile_load<2>(b.data(), 4 * columns);
    tile_load<0>(c.data(), 4 * columns);
    tile_dot_bf16<0, 1, 2>();
    tile_store<0>(expected.data(), 4 * columns);
    tile_load<0>(c.data(), 4 * columns);
    tile_dot_codes<0, 1, 2>();
    tile_store<0>(expected_codes.data(), 4 * columns);
    release_tiles();
    check_equal(found, expected);
    CHECK(codes == expected_codes);
  }
}

template <class Body>
bool faults(const Body& body) {
  try {
    body();
  } catch (const TileFault&) {
    release_tiles();
    return true;
  }
  return false;
}

TEST(a_tile_instruction_that_would_fault_is_seen) {
  CHECK(faults([] { tile_zero<0>(); }));
  CHECK(faults([] {
    tile_configure(config_of(4, 16, 16));
    tile_zero<3>();  // not configured
  }));
  for (int tile : {0, 1, 2}) {
    CHECK(faults([&] {
      TileConfig config = config_of(4, 16, 16);
      config.set(tile, config.rows[tile] - 1, config.row_bytes[tile]);
      tile_configure(config);
      tile_dot_bf16<0, 1, 2>();
    }));
    CHECK(faults([&] {
      TileConfig config = config_of(4, 16, 16);
      config.set(tile, config.rows[tile], config.row_bytes[tile] - 4);
      tile_configure(config);
      tile_dot_codes<0, 1, 2>();
    }));
  }
  CHECK(faults([] { tile_configure(config_of(17, 16, 16)); }));
  TileConfig config = config_of(4, 16, 16);
  config.palette = 2;
  CHECK(faults([&] { tile_configure(config); }));
}

TEST(a_thread_keeps_its_tiles_until_another_configuration_or_their_release) {
  const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  float out[16] = {};
  tile_configure(config_of(1, 16, 16));
  tile_load<0>(ones, 64);
  tile_configure(config_of(1, 16, 16));
  tile_store<0>(out, 64);
  CHECK(same_bits(ones, out, 16));
  tile_configure(config_of(2, 16, 16));
  tile_configure(config_of(1, 16, 16));
  tile_store<0>(out, 64);
  CHECK(out[0] == 0);
  release_tiles();
  CHECK(thread_tiles().release == nullptr);
  CHECK(faults([&] { tile_store<0>(out, 64); }));
}

}  // namespace
}  // namespace cadenza::tests
