// Products with bf16 weights by tiles, at every number of rows.
//
// A packed panel is two tiles B for each 32 elements of K, interleaved by rows: columns 0 to 15, or
// the gate, and columns 16 to 31, or up. Activations are copied into tiles A, [K/32][rows][64 bytes],
// once for all units that a thread computes of a job. What is missing of the last 32 elements is zero
// in both. An element is reduced as vec/tile.h says, over blocks of 32 in ascending order.
#pragma once

#include "kernels/attention_tiles.h"
#include "kernels/experts.h"
#include "kernels/roofline.h"
#include "vec/tile.h"

namespace cadenza::CADENZA_ISA {

// Bytes of a panel for one tile of depth, and of the rows of its two tiles.
constexpr int64_t kPanelTileBytes = kTileDepth / 2 * kStepBytes<bf16>;
constexpr int64_t kPanelRowBytes = kStepBytes<bf16>;
// Bytes ahead of a product that are prefetched, with one and two tiles of rows: on an Emerald Rapids
// weights then passed at 25 to 34 GB/s with 1 to 16 rows, and at 26 to 28 GB/s with 32.
constexpr int64_t kTilePrefetchDistance[2] = {12288, 8192};
// Activations that are multiplied with a panel before the next one stay in the second level of
// cache, of 2 MiB on CPUs with AMX. Longer ones are divided along K, for so many panels at a time.
constexpr int64_t kMaxBlockBytes = 1 << 20, kPanelsOfBlock = 8;
constexpr int64_t kMinPassesToPrefetchKv = 2;

// The registers: sums of two tiles of rows by two of columns, activations, weights.
constexpr int kSums[2][2] = {{0, 1}, {2, 3}}, kRowTiles[2] = {4, 5}, kColumnTiles[2] = {6, 7};

// How the rows of a product are divided: passes over a panel, of one tile of rows or two. All tiles
// have equally many rows, so that one configuration serves; what the last ones lack is zero.
struct TilePasses {
  int64_t rows, steps;  // steps: tiles along K
  int64_t count;        // of passes
  int64_t tiles;        // of a pass: 1 or 2
  int64_t tile_rows;

  TilePasses(int64_t rows_, int64_t k)
      : rows(rows_),
        steps(ceil_div(k, kTileDepth)),
        count(ceil_div(rows_, 2 * kTileRows)),
        tiles(rows_ > kTileRows ? 2 : 1),
        tile_rows(ceil_div(rows_, count * tiles)) {}

  int64_t pass_rows() const { return tiles * tile_rows; }
  int64_t step_bytes() const { return pass_rows() * kTileRowBytes; }
  int64_t pass_bytes() const { return steps * step_bytes(); }
  // The rows of a pass end here.
  int64_t end_of(int64_t pass) const {
    const int64_t end = (pass + 1) * pass_rows();
    return end < rows ? end : rows;
  }
  TileConfig config() const {
    TileConfig config;
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 2; j++) config.set(kSums[i][j], int(tile_rows), kTileRowBytes);
      config.set(kRowTiles[i], int(tile_rows), kTileRowBytes);
      config.set(kColumnTiles[i], kTileRows, kTileRowBytes);
    }
    return config;
  }
};

// Copies one row to the same row of the tiles A at `to`, `step_bytes` apart.
inline void copy_row_to_tiles(const bf16* from, int64_t k, char* to, int64_t step_bytes) {
  const int64_t whole = k / kTileDepth;
  for (int64_t s = 0; s < whole; s++) {
    __builtin_memcpy(to + s * step_bytes, from + s * kTileDepth, kTileRowBytes);
  }
  if (k % kTileDepth == 0) return;
  bf16 last[kTileDepth] = {};
  __builtin_memcpy(last, from + whole * kTileDepth, size_t(k % kTileDepth) * sizeof(bf16));
  __builtin_memcpy(to + whole * step_bytes, last, kTileRowBytes);
}

// Activations [rows, K] as tiles A: for each pass [steps][rows of the pass][64 bytes].
class InputTiles {
 public:
  InputTiles(const void* x, int64_t k, const TilePasses& passes, Worker& worker)
      : x_(static_cast<const bf16*>(x)), k_(k), passes_(passes), worker_(worker) {}

  // The tiles of a pass in [begin, end), which are all copied with the first of them.
  const char* pass(int64_t index, int64_t begin, int64_t end) {
    if (begin != begin_ || end != end_) arrange(begin, end);
    return tiles_ + (index - begin) * passes_.pass_bytes();
  }

 private:
  void arrange(int64_t begin, int64_t end) {
    begin_ = begin;
    end_ = end;
    const bf16* first = x_ + begin * passes_.pass_rows() * k_;
    const int64_t bytes = (end - begin) * passes_.pass_bytes();
    const int64_t rows = passes_.end_of(end - 1) - begin * passes_.pass_rows();
    ArrangedInputs* kept = worker_.arranged;
    tiles_ = kept == nullptr ? nullptr : kept->find(first, rows);
    if (tiles_ != nullptr) return;
    if (kept != nullptr) tiles_ = kept->add(first, rows, bytes);
    if (tiles_ == nullptr) tiles_ = worker_.arena.take<char>(bytes);
    for (int64_t pass = begin; pass < end; pass++) copy_pass(pass);
  }
  void copy_pass(int64_t pass) {
    char* to = tiles_ + (pass - begin_) * passes_.pass_bytes();
    const int64_t first = pass * passes_.pass_rows(), end = passes_.end_of(pass);
    for (int64_t row = first; row < first + passes_.pass_rows(); row++) {
      char* at = to + (row - first) * kTileRowBytes;
      if (row < end) {
        copy_row_to_tiles(x_ + row * k_, k_, at, passes_.step_bytes());
      } else {
        for (int64_t s = 0; s < passes_.steps; s++) {
          __builtin_memset(at + s * passes_.step_bytes(), 0, kTileRowBytes);
        }
      }
    }
  }

  const bf16* x_;
  const int64_t k_;
  const TilePasses& passes_;
  Worker& worker_;
  int64_t begin_ = 0, end_ = 0;
  char* tiles_ = nullptr;
};

// Prefetches [at, at + bytes) along the steps of a product, and KV if `upcoming` is given.
struct StepPrefetch {
  const char* at = nullptr;
  int64_t bytes_per_step = 0;
  bool is_second_level = false;
  UpcomingBlocks* upcoming = nullptr;

  [[gnu::always_inline]] void step(int64_t s) const {
    if (bytes_per_step != 0) {
      const char* end = at + (s + 1) * bytes_per_step;
      if (is_second_level) {
        for (const char* line = at + s * bytes_per_step; line < end; line += kCacheLine) {
          __builtin_prefetch(line, 0, 2);
        }
      } else {
        for (const char* line = at + s * bytes_per_step; line < end; line += kCacheLine) {
          __builtin_prefetch(line, 0, 3);
        }
      }
    }
    if (upcoming == nullptr) return;
    const char* chunk = upcoming->take_chunk();
    for (int64_t i = 0; i < UpcomingBlocks::kChunk; i += kCacheLine) {
      __builtin_prefetch(chunk + i, 0, 2);
    }
  }
};

// The operands of one pass over some steps of a panel.
struct TileOperands {
  const char *a, *w;
  int64_t step_bytes, tile_bytes;  // of a: of a step, and of the first of its tiles
};

// Adds the products of `steps` steps to the sums in the registers.
template <int Tiles>
[[gnu::always_inline]] inline void multiply_steps(const TileOperands& operands, int64_t steps,
                                                  const StepPrefetch& prefetch) {
  const char *a = operands.a, *w = operands.w;
  for (int64_t s = 0; s < steps; s++) {
    prefetch.step(s);
    tile_load<kColumnTiles[0]>(w, kPanelRowBytes);
    tile_load<kRowTiles[0]>(a, kTileRowBytes);
    tile_dot_bf16<kSums[0][0], kRowTiles[0], kColumnTiles[0]>();
    tile_load<kColumnTiles[1]>(w + kTileRowBytes, kPanelRowBytes);
    tile_dot_bf16<kSums[0][1], kRowTiles[0], kColumnTiles[1]>();
    if constexpr (Tiles == 2) {
      tile_load<kRowTiles[1]>(a + operands.tile_bytes, kTileRowBytes);
      tile_dot_bf16<kSums[1][0], kRowTiles[1], kColumnTiles[0]>();
      tile_dot_bf16<kSums[1][1], kRowTiles[1], kColumnTiles[1]>();
    }
    a += operands.step_bytes;
    w += kPanelTileBytes;
  }
}

// The sums of a pass, by rows. They leave the registers between blocks of K.
struct PassSums {
  alignas(64) float rows[2 * kTileRows][kPanel];

  template <int Tiles>
  void to_registers(int64_t tile_rows) const {
    tile_load<kSums[0][0]>(rows[0], sizeof(rows[0]));
    tile_load<kSums[0][1]>(rows[0] + kLanes, sizeof(rows[0]));
    if constexpr (Tiles == 2) {
      tile_load<kSums[1][0]>(rows[tile_rows], sizeof(rows[0]));
      tile_load<kSums[1][1]>(rows[tile_rows] + kLanes, sizeof(rows[0]));
    }
  }
  template <int Tiles>
  void from_registers(int64_t tile_rows) {
    tile_store<kSums[0][0]>(rows[0], sizeof(rows[0]));
    tile_store<kSums[0][1]>(rows[0] + kLanes, sizeof(rows[0]));
    if constexpr (Tiles == 2) {
      tile_store<kSums[1][0]>(rows[tile_rows], sizeof(rows[0]));
      tile_store<kSums[1][1]>(rows[tile_rows] + kLanes, sizeof(rows[0]));
    }
  }
};

template <int Tiles>
inline void clear_registers() {
  tile_zero<kSums[0][0]>();
  tile_zero<kSums[0][1]>();
  if constexpr (Tiles == 2) {
    tile_zero<kSums[1][0]>();
    tile_zero<kSums[1][1]>();
  }
}

// One pass over a block of K of a panel. `last` is its last step, if that one is not whole.
struct BlockProduct {
  TileOperands operands;
  int64_t steps;
  const char* last;
  bool is_first;  // block of K
};
template <int Tiles>
[[gnu::noinline]] void multiply_block(const BlockProduct& product, const StepPrefetch& prefetch,
                                      PassSums& sums) {
  const TileOperands& operands = product.operands;
  const int64_t tile_rows = operands.tile_bytes / kTileRowBytes;
  if (product.is_first) {
    clear_registers<Tiles>();
  } else {
    sums.to_registers<Tiles>(tile_rows);
  }
  multiply_steps<Tiles>(operands, product.steps, prefetch);
  if (product.last != nullptr) {
    const char* a = operands.a + product.steps * operands.step_bytes;
    multiply_steps<Tiles>({a, product.last, operands.step_bytes, operands.tile_bytes}, 1, {});
  }
  sums.from_registers<Tiles>(tile_rows);
}

// The products of units [begin, end), which have the same row block.
template <class MakeEpilogue>
class TileUnits {
 public:
  TileUnits(const void* x, const void* w, const Grid& grid, Worker& worker,
            const MakeEpilogue& make_epilogue)
      : w_(static_cast<const char*>(w)),
        grid_(grid),
        worker_(worker),
        make_epilogue_(make_epilogue),
        passes_(grid.rows, grid.k),
        inputs_(x, grid.k, passes_, worker) {
    tile_configure(passes_.config());
  }

  void run(int64_t begin, int64_t end) {
    const int64_t block = begin / grid_.panels;
    first_pass_ = block * passes_.count / grid_.row_blocks;
    last_pass_ = (block + 1) * passes_.count / grid_.row_blocks;
    const int64_t count = last_pass_ - first_pass_;
    block_steps_ = passes_.steps;
    if (count > 1 && count * passes_.pass_bytes() > kMaxBlockBytes) {
      const int64_t blocks = ceil_div(count * passes_.pass_bytes(), kMaxBlockBytes);
      block_steps_ = ceil_div(passes_.steps, blocks);
    }
    const bool is_divided = block_steps_ < passes_.steps;
    const int64_t most = is_divided ? kPanelsOfBlock : 1;
    PassSums* sums = worker_.arena.take<PassSums>(is_divided ? most * count : 1);
    for (int64_t unit = begin; unit < end; unit += most) {
      const int64_t panels = end - unit < most ? end - unit : most;
      run_group(unit, panels, sums, is_divided ? count : 0);
    }
  }

 private:
  // Each block of K of `panels` panels; `sums_apart` of them between two panels.
  void run_group(int64_t unit, int64_t panels, PassSums* sums, int64_t sums_apart) {
    const int64_t first_panel = unit % grid_.panels;
    for (int64_t step = 0; step < passes_.steps; step += block_steps_) {
      for (int64_t i = 0; i < panels; i++) {
        const char* next = nullptr;
        if (i + 1 < panels) {
          next = panel(first_panel + i + 1, step);
        } else if (step + block_steps_ < passes_.steps) {
          next = panel(first_panel, step + block_steps_);
        } else if (unit + panels != worker_.share_end && first_panel + panels < grid_.panels) {
          next = panel(first_panel + panels, 0);
        }
        const bool ends_share = unit + i + 1 == worker_.share_end;
        run_panel(first_panel + i, step, prefetch_of(first_panel + i, step, next, ends_share),
                  sums + i * sums_apart);
      }
    }
  }

  // One block of K of a panel, from a step on, for all passes.
  void run_panel(int64_t index, int64_t step, StepPrefetch prefetch, PassSums* sums) {
    const int64_t left = passes_.steps - step, steps = left < block_steps_ ? left : block_steps_;
    const bool is_last = steps == left, has_tail = is_last && grid_.k % kTileDepth != 0;
    BlockProduct product{{nullptr, panel(index, step), passes_.step_bytes(),
                          passes_.tile_rows * kTileRowBytes},
                         has_tail ? steps - 1 : steps,
                         has_tail ? copy_tail(index) : nullptr,
                         step == 0};
    auto epilogue = make_epilogue_(index);
    const int64_t count = last_pass_ - first_pass_;
    for (int64_t pass = first_pass_; pass < last_pass_; pass++) {
      const int64_t at = pass - first_pass_;
      product.operands.a =
          inputs_.pass(pass, first_pass_, last_pass_) + step * passes_.step_bytes();
      PassSums& mine = block_steps_ < passes_.steps ? sums[at] : *sums;
      if (passes_.tiles == 2) {
        multiply_block<2>(product, prefetch, mine);
      } else {
        multiply_block<1>(product, prefetch, mine);
      }
      if (count > 1) prefetch.at += product.steps * prefetch.bytes_per_step;
      if (is_last) finish(epilogue, pass, mine);
    }
  }

  // With one pass a panel prefetches itself, ahead of the product; with several the next one, spread
  // over the passes; the last of the thread's share the next weight's first one.
  StepPrefetch prefetch_of(int64_t index, int64_t step, const char* next, bool ends_share) {
    const int64_t count = last_pass_ - first_pass_;
    if (count == 1) {
      return {panel(index, step) + kTilePrefetchDistance[passes_.tiles - 1], kPanelTileBytes, false,
              nullptr};
    }
    if (next == nullptr && ends_share && !worker_.prefetch.empty()) {
      next = worker_.prefetch.at;
      worker_.prefetch.at += block_steps_ * kPanelTileBytes;
    }
    UpcomingBlocks* upcoming = count >= kMinPassesToPrefetchKv ? &worker_.upcoming : nullptr;
    return {next, next == nullptr ? 0 : kPanelTileBytes / count, true, upcoming};
  }

  template <class Epilogue>
  void finish(const Epilogue& epilogue, int64_t pass, const PassSums& sums) {
    const int64_t first = pass * passes_.pass_rows(), end = passes_.end_of(pass);
    for (int64_t row = first; row < end; row++) {
      const float* from = sums.rows[row - first];
      const Vec columns[kPanelVecs] = {load(from), load(from + kLanes)};
      epilogue(row, columns);
    }
  }

  const char* panel(int64_t index, int64_t step) const {
    return w_ + index * panel_bytes(WeightFormat::kBf16, grid_.k) + step * kPanelTileBytes;
  }
  // The last step of a panel that has no whole one, with zeros.
  const char* copy_tail(int64_t index) {
    const int64_t whole = grid_.k / kTileDepth * kPanelTileBytes;
    const int64_t bytes = panel_bytes(WeightFormat::kBf16, grid_.k) - whole;
    __builtin_memset(tail_, 0, sizeof(tail_));
    __builtin_memcpy(tail_, panel(index, 0) + whole, size_t(bytes));
    return tail_;
  }

  const char* w_;
  const Grid& grid_;
  Worker& worker_;
  const MakeEpilogue& make_epilogue_;
  const TilePasses passes_;
  InputTiles inputs_;
  int64_t first_pass_ = 0, last_pass_ = 0, block_steps_ = 0;
  alignas(64) char tail_[kPanelTileBytes];
};

// How the kernels of dense products and of experts multiply weights of bf16.
struct TileProduct {
  static const void* row(const void* x, int64_t row, int64_t k) {
    return FloatProduct<bf16>::row(x, row, k);
  }
  static const void* expert(const void* w, int64_t expert, int64_t panels, int64_t k) {
    return FloatProduct<bf16>::expert(w, expert, panels, k);
  }
  template <class MakeEpilogue>
  static void run(const void* x, const void* w, const Grid& grid, int64_t begin, int64_t end,
                  Worker& worker, const MakeEpilogue& make_epilogue) {
    TileUnits<MakeEpilogue> units(x, w, grid, worker, make_epilogue);
    while (begin < end) {
      const int64_t end_of_block = (begin / grid.panels + 1) * grid.panels;
      const int64_t stop = end < end_of_block ? end : end_of_block;
      units.run(begin, stop);
      begin = stop;
    }
  }
};

// The tiles of the products without their loads: their upper bound.
inline void multiply_tile_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const MultiplyTask*>(context);
  constexpr int64_t kStepsOfTile = 16;  // a step of the task has about the work of a vector tile
  const int64_t steps = (end - begin) * (task.steps / kStepsOfTile);
  tile_configure(TilePasses(2 * kTileRows, kTileDepth).config());
  clear_registers<2>();
  for (int64_t step = 0; step < steps; step++) {
    if (step == 0) {
      tile_load<kRowTiles[0]>(task.seeds, 0);
      tile_load<kRowTiles[1]>(task.seeds, 0);
      tile_load<kColumnTiles[0]>(task.seeds, 0);
      tile_load<kColumnTiles[1]>(task.seeds, 0);
    }
    tile_dot_bf16<kSums[0][0], kRowTiles[0], kColumnTiles[0]>();
    tile_dot_bf16<kSums[0][1], kRowTiles[0], kColumnTiles[1]>();
    tile_dot_bf16<kSums[1][0], kRowTiles[1], kColumnTiles[0]>();
    tile_dot_bf16<kSums[1][1], kRowTiles[1], kColumnTiles[1]>();
  }
  constexpr int64_t kPerStep = 4 * 2 * kTileRows * kLanes * kTileDepth;
  __atomic_fetch_add(task.operations, steps * kPerStep, __ATOMIC_RELAXED);
}

// A table whose products of bf16 weights, and attention over KV in bf16, are made of tiles, and whose
// other kernels are those of `base`.
inline KernelTable make_tile_table(const char* isa, const KernelTable& base) {
  constexpr int kBf16 = int(WeightFormat::kBf16);
  KernelTable table = base;
  table.isa = isa;
  table.max_rows[kBf16] = kTileRows;
  table.linear[kBf16] = linear_units<TileProduct, bf16>;
  table.gated[kBf16] = gated_units<TileProduct, bf16>;
  table.logits[kBf16] = logits_units<TileProduct>;
  table.grouped_gated[kBf16] = grouped_gated_units<TileProduct, bf16>;
  table.grouped_linear[kBf16] = grouped_linear_units<TileProduct>;
  table.head_linear[kBf16] = head_linear_units<TileProduct, bf16>;
  table.attend[kBf16] = attend_units<TileKv>;
  table.multiply[kBf16] = multiply_tile_units;
  return table;
}

}  // namespace cadenza::CADENZA_ISA
