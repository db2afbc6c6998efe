// Products of quantised activations with quantised weights by tile registers. The arithmetic is
// that of core/quantised.h, and kernels/quantised.h, which multiplies few rows, has the same bits.
//
// A unit goes through K in blocks of kBlockGroups groups. A panel's block is expanded once for all
// rows of the unit: signed codes in the layout of B tiles, scales and offsets in f32. A group, or a
// part of it that has its own scales, is one product of 16 rows and 16 columns from zero; its exact
// dots are stored, and folded by vectors two groups later, so that tiles and vectors work at the
// same time. The sums of 16 rows and 16 columns stay in registers for a block of K.
//
// With 16 rows a group of 32 costs a column vector 16 cycles of the tile unit and 48 vector
// operations at two a cycle (64 with offsets); dots of vectors need 128 and 48.
#pragma once

#include "kernels/quantised.h"
#include "vec/tile.h"

namespace cadenza::CADENZA_ISA {

constexpr int kBlockGroups = 8, kMostParts = 2;
constexpr int kGroupWords = kGroup / 4;  // of four codes: the rows of a B tile

// Groups of a panel, expanded.
struct alignas(64) PanelBlock {
  uint8_t codes[kMostParts][kBlockGroups][kPanelVecs][kGroupWords][kTileRowBytes];
  float scales[kMostParts][kBlockGroups][kPanel];
  float offsets[kMostParts][kBlockGroups][kPanel];
};

// What the folds of kBlockGroups groups need of one row: of each group its scale and the sum of its
// codes times the scale; the sums of its two halves, times the scale.
struct alignas(64) RowTerms {
  float whole[2 * kBlockGroups];
  float parts[2 * kBlockGroups];
};
static_assert(2 * kBlockGroups == kLanes && sizeof(GroupTerms) == 8, "a vector of a row's terms");

// The configuration of products of so many rows: C in tiles 0 to 3, A in 4 and 5, B in 6 and 7.
inline TileConfig config_of_rows(int rows) {
  TileConfig config;
  for (int c = 0; c < 4; c++) config.set(c, rows, kTileRowBytes);
  for (int a = 4; a < 6; a++) config.set(a, rows, kGroup);
  for (int b = 6; b < 8; b++) config.set(b, kGroupWords, kTileRowBytes);
  return config;
}

inline void store_words(void* p, VecI words) { store(static_cast<float*>(p), as_float(words)); }

// Each byte less that of `less`; the codes are from 0 to 127, and less than 128.
inline VecI subtract_bytes(VecI codes, VecI less) {
  const VecI sign = set1_i(0x80808080);
  return xor_i(add_i(codes, sub_i(sign, less)), sign);
}

// kDoubledE2m1 of each byte.
inline VecI doubled_e2m1(VecI indices) {
#ifdef CADENZA_VEC_AVX512
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kDoubledE2m1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), indices);
#else
  alignas(64) uint8_t bytes[4 * kLanes];
  store_words(bytes, indices);
  for (uint8_t& byte : bytes) byte = uint8_t(kDoubledE2m1[byte]);
  return load_words(bytes);
#endif
}

// Sixteen columns' zero points, or what is stored for 0, in each byte of their words.
template <class F>
inline VecI code_of_zero(const uint8_t* zero_points) {
  if constexpr (F::kHasZeroPoints) {
    alignas(64) uint32_t words[kLanes];
    for (int i = 0; i < kLanes; i++) words[i] = 0x01010101u * zero_points[i];
    return load_words(reinterpret_cast<const uint8_t*>(words));
  }
  if constexpr (F::kFormat.correction == Correction::kNone) {
    return set1_i(0x01010101u * uint32_t(F::kFormat.middle()));
  }
  return set1_i(0);
}

// Expands the codes of a group's column vector `j` to signed ones, without their zero point.
template <class F>
inline void expand_codes(const uint8_t* group, int j, uint8_t (&out)[kGroupWords][kTileRowBytes]) {
  constexpr CodeFormat kFormat = F::kFormat;
  if constexpr (kFormat.bits == 8) {
    for (int word = 0; word < kGroupWords; word++) {
      const VecI codes = load_words(group + (word * kPanelVecs + j) * 64);
      store_words(out[word], xor_i(codes, set1_i(0x80808080)));
    }
  } else {
    const VecI less = code_of_zero<F>(group + kFormat.corrections_at() + j * kLanes);
    constexpr int kAbove = kFormat.bits - 4, kPartWords = kFormat.group / 4;
    const VecI mask = set1_i(0x0f0f0f0f), above = set1_i(kAbove == 1 ? 0x10101010 : 0x30303030);
    const auto sign = [&](VecI codes) {
      return kFormat.is_mxfp4() ? doubled_e2m1(codes) : subtract_bytes(codes, less);
    };
    for (int part = 0; part < kFormat.num_parts(); part++) {
      const uint8_t* codes = group + part * kFormat.code_bytes() / kFormat.num_parts();
      VecI highest = set1_i(0);
      if constexpr (kAbove > 0) highest = load_words(codes + kFormat.nibble_bytes() + j * 64);
      for (int byte = 0; byte < kPartWords / 2; byte++) {
        const VecI both = load_words(codes + (byte * kPanelVecs + j) * 64);
        VecI low = and_i(both, mask), high = and_i(shr<4>(both), mask);
        if constexpr (kAbove > 0) {
          low = or_i(low, and_i(shl<4>(highest), above));
          high = or_i(high, and_i(shl<4 - kAbove>(highest), above));
          highest = shr<2 * kAbove>(highest);
        }
        store_words(out[part * kPartWords + 2 * byte], sign(low));
        store_words(out[part * kPartWords + 2 * byte + 1], sign(high));
      }
    }
  }
}

// Moves the second half of a group's codes to a tile of its own. In the tile of one part, the words
// of the other are 0, so that both are multiplied by the same A tile.
inline void separate_parts(uint8_t (&first)[kGroupWords][kTileRowBytes],
                           uint8_t (&second)[kGroupWords][kTileRowBytes]) {
  constexpr size_t kHalf = sizeof(first) / 2;
  __builtin_memset(second, 0, kHalf);
  __builtin_memcpy(second[kGroupWords / 2], first[kGroupWords / 2], kHalf);
  __builtin_memset(first[kGroupWords / 2], 0, kHalf);
}

// Which groups of a panel to expand.
struct ExpandTask {
  const CodePanel& panel;
  int64_t k, first;
  int count;
};

template <int Format>
void expand_block(const ExpandTask& task, PanelBlock& block, SpreadPrefetch& prefetch) {
  using F = Codes<Format>;
  constexpr CodeFormat kFormat = F::kFormat;
  const uint8_t* w =
      task.panel.data + kFormat.groups_at(task.k) + task.first * kFormat.group_bytes();
  for (int g = 0; g < task.count; g++, w += kFormat.group_bytes()) {
    const uint8_t* factors = group_factors<F>(task.panel.data, task.first + g);
    for (int j = 0; j < kPanelVecs; j++) {
      expand_codes<F>(w, j, block.codes[0][g][j]);
      if constexpr (kFormat.num_parts() == 2) {
        separate_parts(block.codes[0][g][j], block.codes[1][g][j]);
      }
      for (int part = 0; part < kFormat.num_parts(); part++) {
        const GroupPart at = group_part<F>(w, factors, nullptr, part, j);
        store(block.scales[part][g] + at.lane, F::load_scales(at.scales, at.factors, at.lane));
        if constexpr (F::kHasOffsets) {
          store(block.offsets[part][g] + at.lane,
                F::load_scales(at.corrections, at.factors + kPanel * 2, at.lane));
        }
      }
    }
    if (prefetch.bytes_per_step != 0) prefetch_group(prefetch);
  }
}

// A row's terms of up to kBlockGroups groups.
inline void fill_terms(RowTerms& to, const uint8_t* terms, int groups) {
#ifdef CADENZA_VEC_AVX512
  const __mmask16 given = __mmask16((1u << 2 * groups) - 1), odd = 0xaaaa;
  const __m512i words = _mm512_maskz_loadu_epi32(given, terms);
  const __m512i first = _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16);
  const __m512i second = _mm512_srai_epi32(words, 16);
  const __m512 scales = _mm512_moveldup_ps(_mm512_castsi512_ps(words));
  const auto scaled = [&](__m512i totals) { return mul(from_i32(totals), scales); };
  store(to.whole, _mm512_mask_blend_ps(odd, scales, scaled(_mm512_add_epi32(first, second))));
  store(to.parts, _mm512_mask_blend_ps(odd, _mm512_movehdup_ps(scaled(first)), scaled(second)));
#else
  to = {};
  for (int g = 0; g < groups; g++) {
    GroupTerms term;
    __builtin_memcpy(&term, terms + g * int64_t(sizeof(term)), sizeof(term));
    to.whole[2 * g] = term.scale;
    to.whole[2 * g + 1] = float(term.totals[0] + term.totals[1]) * term.scale;
    for (int part = 0; part < 2; part++) {
      to.parts[2 * g + part] = float(term.totals[part]) * term.scale;
    }
  }
#endif
}

// The rows [begin, end) of a unit in tiles of 16, of which the last may overlap the one before, or
// in one tile of fewer. Their terms are arranged once for a thread and job.
class TiledRows {
 public:
  TiledRows(const void* x, int64_t k, Worker& worker)
      : x_(static_cast<const uint8_t*>(x)), k_(k), worker_(worker) {}

  void prepare(int64_t begin, int64_t end) {
    if (begin == begin_ && end == end_) return;
    begin_ = begin;
    end_ = end;
    ArrangedInputs* kept = worker_.arranged;
    const uint8_t* rows = x_ + begin * stride();
    void* found = kept == nullptr ? nullptr : kept->find(rows, end - begin);
    terms_ = static_cast<RowTerms*>(found);
    if (found != nullptr) return;
    const int64_t count = tiles() * blocks() * kTileRows;
    const int64_t bytes = count * int64_t(sizeof(RowTerms));
    if (kept != nullptr) found = kept->add(rows, end - begin, bytes);
    terms_ = found == nullptr ? worker_.arena.take<RowTerms>(count) : static_cast<RowTerms*>(found);
    for (int64_t tile = 0; tile < tiles(); tile++) {
      for (int64_t block = 0; block < blocks(); block++) prepare_terms(tile, block);
    }
  }

  int64_t tiles() const { return ceil_div(end_ - begin_, kTileRows); }
  int64_t blocks() const { return ceil_div(groups(), kBlockGroups); }
  // Groups of a block.
  int count(int64_t block) const {
    const int64_t left = groups() - block * kBlockGroups;
    return int(left < kBlockGroups ? left : kBlockGroups);
  }
  int rows_of_tile() const { return int(end_ - begin_ < kTileRows ? end_ - begin_ : kTileRows); }
  int64_t first_row(int64_t tile) const {
    const int64_t last = end_ - rows_of_tile(), row = begin_ + tile * kTileRows;
    return row < last ? row : last;
  }
  // Rows of a tile that the one before it has, too.
  int overlap(int64_t tile) const { return int(begin_ + tile * kTileRows - first_row(tile)); }
  const uint8_t* codes(int64_t tile, int64_t block) const {
    return x_ + first_row(tile) * stride() + block * kBlockGroups * kGroup;
  }
  const RowTerms* terms(int64_t tile, int64_t block) const {
    return terms_ + (tile * blocks() + block) * kTileRows;
  }
  int64_t stride() const { return code_row_bytes(k_); }

 private:
  int64_t groups() const { return ceil_div(k_, kGroup); }
  void prepare_terms(int64_t tile, int64_t block) {
    RowTerms* to = terms_ + (tile * blocks() + block) * kTileRows;
    const uint8_t* from = x_ + first_row(tile) * stride() + groups() * kGroup +
                          block * kBlockGroups * int64_t(sizeof(GroupTerms));
    for (int i = 0; i < rows_of_tile(); i++) fill_terms(to[i], from + i * stride(), count(block));
    for (int i = rows_of_tile(); i < kTileRows; i++) to[i] = {};
  }

  const uint8_t* x_;
  const int64_t k_;
  Worker& worker_;
  int64_t begin_ = 0, end_ = 0;
  RowTerms* terms_ = nullptr;
};

// The dots of a group, or of its parts, of 16 rows and 16 columns.
template <int Parts>
struct TileDots {
  alignas(64) int32_t words[Parts][kTileRows][kLanes];
};

// What one tile of rows multiplies in a block.
struct BlockProduct {
  const uint8_t* x;
  int64_t stride;
  const RowTerms* terms;
  const PanelBlock& panel;
  int groups;
};

// Multiplies group g with column vector j by one of two sets of tiles.
template <int Set, int Parts>
[[gnu::always_inline]] inline void multiply_group(const BlockProduct& product, int g, int j,
                                                  TileDots<Parts>& dots) {
  constexpr int C = 2 * Set, A = 4 + Set, B = 6 + Set;
  tile_load<A>(product.x + g * kGroup, product.stride);
  tile_zero<C>();
  tile_load<B>(product.panel.codes[0][g][j], kTileRowBytes);
  tile_dot_codes<C, A, B>();
  tile_store<C>(dots.words[0], kTileRowBytes);
  if constexpr (Parts == 2) {
    tile_zero<C + 1>();
    tile_load<B>(product.panel.codes[1][g][j], kTileRowBytes);
    tile_dot_codes<C + 1, A, B>();
    tile_store<C + 1>(dots.words[1], kTileRowBytes);
  }
}

// Folds the dots of group g; sums of rows that the tile does not have are not read.
template <int MR, int Parts, bool HasOffsets>
[[gnu::always_inline]] inline void fold_dots(Vec (&sums)[MR], const BlockProduct& product, int g,
                                             int j, const TileDots<Parts>& dots) {
#pragma GCC unroll 2
  for (int part = 0; part < Parts; part++) {
    const Vec column = load(product.panel.scales[part][g] + j * kLanes);
    Vec offset = zero();
    if constexpr (HasOffsets) offset = load(product.panel.offsets[part][g] + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const RowTerms& terms = product.terms[i];
      const auto* words = reinterpret_cast<const uint8_t*>(dots.words[part][i]);
      const Vec dot = from_i32(load_words(words));
      sums[i] = fma(mul(dot, set1(terms.whole[2 * g])), column, sums[i]);
      if constexpr (HasOffsets) {
        const float total = Parts == 1 ? terms.whole[2 * g + 1] : terms.parts[2 * g + part];
        sums[i] = fma(set1(total), offset, sums[i]);
      }
    }
  }
}

// Adds a block's groups to the sums of a tile of at most MR rows.
template <int MR, int Parts, bool HasOffsets>
[[gnu::noinline]] void multiply_block(const BlockProduct& product, Vec (*sums)[kPanelVecs]) {
  constexpr int kAhead = 2;
  TileDots<Parts> dots[2 * kAhead];
  for (int j = 0; j < kPanelVecs; j++) {
    Vec own[MR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) own[i] = sums[i][j];
    multiply_group<0>(product, 0, j, dots[0]);
    if (product.groups > 1) multiply_group<1>(product, 1, j, dots[1]);
    for (int g = 0; g < product.groups; g += kAhead) {
      if (g + 2 < product.groups) multiply_group<0>(product, g + 2, j, dots[(g + 2) % 4]);
      fold_dots<MR, Parts, HasOffsets>(own, product, g, j, dots[g % 4]);
      if (g + 1 == product.groups) break;
      if (g + 3 < product.groups) multiply_group<1>(product, g + 3, j, dots[(g + 3) % 4]);
      fold_dots<MR, Parts, HasOffsets>(own, product, g + 1, j, dots[(g + 1) % 4]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) sums[i][j] = own[i];
  }
}

constexpr int kHalfTile = kTileRows / 2;

struct FormatByTiles {
  void (*expand)(const ExpandTask& task, PanelBlock& block, SpreadPrefetch& prefetch);
  void (*half)(const BlockProduct& product, Vec (*sums)[kPanelVecs]);  // at most kHalfTile rows
  void (*whole)(const BlockProduct& product, Vec (*sums)[kPanelVecs]);
};

template <int Format>
constexpr FormatByTiles format_by_tiles() {
  using F = Codes<Format>;
  constexpr int kParts = F::kFormat.num_parts();
  return {expand_block<Format>, multiply_block<kHalfTile, kParts, F::kHasOffsets>,
          multiply_block<kTileRows, kParts, F::kHasOffsets>};
}

struct FormatsByTiles {
  FormatByTiles of_formats[kNumCodeFormats];
};
template <int... Format>
constexpr FormatsByTiles make_formats_by_tiles(std::integer_sequence<int, Format...>) {
  return {{format_by_tiles<Format>()...}};
}
constexpr FormatsByTiles kByTiles =
    make_formats_by_tiles(std::make_integer_sequence<int, kNumCodeFormats>());

// Scratch memory of a unit.
struct TileScratch {
  PanelBlock* block;
  Vec (*sums)[kPanelVecs];  // [tiles, 16]
};

// Multiplies a panel with all rows.
inline void multiply_panel(const CodePanel& panel, int64_t k, const TiledRows& rows,
                           const TileScratch& scratch, SpreadPrefetch& prefetch) {
  const FormatByTiles& format = kByTiles.of_formats[panel.format];
  const auto multiply = rows.rows_of_tile() <= kHalfTile ? format.half : format.whole;
  for (int64_t i = 0; i < rows.tiles() * kTileRows; i++) {
    for (int v = 0; v < kPanelVecs; v++) scratch.sums[i][v] = zero();
  }
  tile_configure(config_of_rows(rows.rows_of_tile()));
  for (int64_t block = 0; block < rows.blocks(); block++) {
    const int count = rows.count(block);
    format.expand({panel, k, block * kBlockGroups, count}, *scratch.block, prefetch);
    for (int64_t tile = 0; tile < rows.tiles(); tile++) {
      const BlockProduct product{rows.codes(tile, block), rows.stride(), rows.terms(tile, block),
                                 *scratch.block, count};
      multiply(product, scratch.sums + tile * kTileRows);
    }
  }
}

// The bytes ahead that a unit prefetches while it expands its panel.
inline SpreadPrefetch prefetch_ahead(const CodePanel& panel, bool is_last_of_share,
                                     Worker& worker) {
  const int64_t bytes = kCodeFormats[panel.format].group_bytes();
  if (!is_last_of_share) {
    const char* own = reinterpret_cast<const char*>(panel.data);
    return {own + kPrefetchDistance, bytes, CacheLevels::kSecond};
  }
  SpreadPrefetch prefetch;
  if (!worker.prefetch.empty()) prefetch = {worker.prefetch.at, bytes, CacheLevels::kSecond};
  worker.prefetch.at += panel.bytes;
  return prefetch;
}

// Rows of a unit from which each format is multiplied by tiles.
struct LeastTileRows {
  int of_formats[kNumCodeFormats];

  int of_any() const {
    int least = kNeverByTiles;
    for (int rows : of_formats) least = rows < least ? rows : least;
    return least;
  }
};

// Folds the second codes of all rows, and finishes them.
template <class Epilogue>
inline void finish_panel(const QuantisedProduct& product, int format, const TiledRows& rows,
                         Vec (*sums)[kPanelVecs], const Epilogue& epilogue) {
  const RemainderFn fold = kCodeTiles.of_formats[format].remainders;
  for (int64_t tile = 0; tile < rows.tiles(); tile++, sums += kTileRows) {
    const int64_t row = rows.first_row(tile);
    const int first = rows.overlap(tile), count = rows.rows_of_tile() - first;
    fold(product, row + first, count, sums + first);
    for (int i = first; i < first + count; i++) epilogue(row + i, sums[i]);
  }
}

// As run_code_panels; a format is multiplied by tiles if the units of the grid have enough rows.
template <class MakeEpilogue>
inline void run_tiled_panels(const void* x, const void* w, const Grid& grid, int64_t begin,
                             int64_t end, Worker& worker, const LeastTileRows& least,
                             const MakeEpilogue& make_epilogue) {
  const int64_t tiles = ceil_div(grid.rows, kTileRows), rows = grid.rows / grid.row_blocks;
  if (rows < least.of_any()) return run_code_panels(x, w, grid, begin, end, worker, make_epilogue);
  TiledRows inputs(x, grid.k, worker);
  TileScratch scratch{nullptr, nullptr};
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t index = unit % grid.panels, block = unit / grid.panels;
    const CodePanel panel = code_panel(w, index);
    if (rows < least.of_formats[panel.format]) {
      run_code_panels(x, w, grid, unit, unit + 1, worker, make_epilogue);
      continue;
    }
    if (scratch.block == nullptr) {
      scratch.block = worker.arena.take<PanelBlock>(1);
      const int64_t most = ceil_div(tiles, grid.row_blocks) * kTileRows;
      scratch.sums = worker.arena.take<Vec[kPanelVecs]>(most);
    }
    const auto row_of = [&](int64_t at) {
      const int64_t row = at * tiles / grid.row_blocks * kTileRows;
      return row < grid.rows ? row : grid.rows;
    };
    if (row_of(block) == row_of(block + 1)) continue;
    inputs.prepare(row_of(block), row_of(block + 1));
    SpreadPrefetch prefetch = prefetch_ahead(panel, unit + 1 == worker.share_end, worker);
    multiply_panel(panel, grid.k, inputs, scratch, prefetch);
    finish_panel({static_cast<const uint8_t*>(x), panel.data, grid.k}, panel.format, inputs,
                 scratch.sums, make_epilogue(index));
  }
}

}  // namespace cadenza::CADENZA_ISA
