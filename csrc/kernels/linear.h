// Products of activations with packed weights: linear, gated linear, and logits with their argmax.
//
// A unit is one panel of 32 columns for one block of rows. Each output element has one accumulator,
// which runs over all of K in ascending order, so its bits do not depend on the number of rows, the
// row blocks or the threads.
#pragma once

#include <utility>

#include "core/kernel_table.h"
#include "kernels/math.h"
#include "kernels/micro.h"

namespace cadenza::CADENZA_ISA {

// What a weight's elements T say about its products: the type of the activations, the format of
// the packed weight and the most rows of a register tile. Others: kernels/float8.h.
template <class T>
struct WeightTraits {
  using Act = T;
  static constexpr WeightFormat kFormat = kStep<T> == 2 ? WeightFormat::kBf16 : WeightFormat::kF32;
  static constexpr int kTileRows = kMaxRows;
};

// Bytes of a panel for one step of K.
template <class T>
constexpr int64_t kStepBytes = kPanel * kStep<T> * int64_t(sizeof(T));

// The operands of one panel's product.
template <class T>
struct PanelProduct {
  const Input<T>* x;
  int64_t row_stride;  // elements between rows of x
  const T* w;          // the panel
  int64_t k;
};

constexpr int kPanelVecs = kPanel / kLanes;
// Bytes ahead of a product that are prefetched: memory needs so many lines in flight. Measured with
// 4, 8 and 16 KiB, 1 to 8 rows, every table: at 73 GB/s 8 was fastest, at 45 GB/s all were equal.
constexpr int64_t kPrefetchDistance = 8192;
// A tile of so many rows multiplies about as long as its weights are read: they are prefetched into
// both levels, from further ahead. At 55 GB/s 7, 8 and 12 rows of a 1B shape took 0.83, 0.83 and
// 0.92 of the time (avx512_bf16); 1 to 4 rows took more.
constexpr int64_t kMinRowsForBothLevels = 6, kFarPrefetchDistance = 12288;
// Row tiles from which a product multiplies long enough for memory to be idle. With two, prefetched
// KV competes with the weights: 16 rows took 5 % longer on avx512_bf16.
constexpr int64_t kMinTilesToPrefetchKv = 3;

// Of a panel that `count` row tiles prefetch. 16 rows in two tiles took 0.85 of the time with the
// second level; with three tiles or more, which multiply longer, the first is 3 % faster.
inline CacheLevels levels_of_next_panel(int64_t count) {
  return count == 2 ? CacheLevels::kSecond : CacheLevels::kFirst;
}

// Reduces MR rows, from x on, and NR column vectors, from w on, over `count` elements of K.
template <class T, int MR, int NR>
[[gnu::always_inline]] inline void reduce_run(Vec (&acc)[MR][NR], const Input<T>* x,
                                              int64_t row_stride, const T* first_w, int64_t count,
                                              SpreadPrefetch prefetch, UpcomingBlocks* upcoming) {
  constexpr int64_t kStride = kPanel * kStep<T>;
  const T* w[NR];
  for (int j = 0; j < NR; j++) w[j] = first_w + j * kLanes * kStep<T>;
  clear(acc);
  int64_t whole = count / kStep<T>;
  if (upcoming != nullptr) {
    accumulate<T, MR, NR>(acc, x, row_stride, whole, w, kStride, prefetch, nullptr, upcoming);
  } else {
    accumulate<T, MR, NR>(acc, x, row_stride, whole, w, kStride, prefetch);
  }
  if (count % kStep<T> == 0) return;
  for (int j = 0; j < NR; j++) {
    auto weight = Elem<T>::template weight<0>(w[j] + whole * kStride);
    for (int i = 0; i < MR; i++) {
      auto last = Elem<T>::broadcast_last(x + i * row_stride + whole * kStep<T>);
      acc[i][j] = Elem<T>::multiply_add(acc[i][j], weight, last);
    }
  }
}

// Reduces MR rows and NR consecutive column vectors of a panel over K.
template <class T>
struct Reduction {
  template <int MR, int NR>
  [[gnu::always_inline]] static void columns(Vec (&acc)[MR][NR], const PanelProduct<T>& product,
                                             int64_t row, int column, SpreadPrefetch prefetch,
                                             UpcomingBlocks* upcoming) {
    reduce_run<T, MR, NR>(acc, product.x + row * product.row_stride, product.row_stride,
                          product.w + column * kStep<T>, product.k, prefetch, upcoming);
  }
};

// Computes MR rows of a panel. A function of its own for each MR, which all products share: compiled
// into each of them, the tiles took most of the time to compile a table.
template <class T, int MR>
[[gnu::noinline]] void float_tile(const PanelProduct<T>& product, int64_t row,
                                  SpreadPrefetch prefetch, UpcomingBlocks* upcoming,
                                  Vec (*sums)[kPanelVecs]) {
  constexpr int NR = tile_vecs<MR>(kPanelVecs);
  for (int j = 0; j < kPanelVecs; j += NR) {
    Vec part[MR][NR];
    Reduction<T>::columns(part, product, row, j * kLanes, prefetch, upcoming);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
      for (int v = 0; v < NR; v++) sums[i][j + v] = part[i][v];
    }
  }
}

template <class T>
using FloatTile = void (*)(const PanelProduct<T>& product, int64_t row, SpreadPrefetch prefetch,
                           UpcomingBlocks* upcoming, Vec (*sums)[kPanelVecs]);

template <class T>
struct FloatTiles {
  FloatTile<T> of_rows[WeightTraits<T>::kTileRows];  // index 0 has one row
};

template <class T, int... Row>
constexpr FloatTiles<T> make_float_tiles(std::integer_sequence<int, Row...>) {
  return {{float_tile<T, Row + 1>...}};
}

// Lines at a distance of kSetStride bytes are in one set of the first-level cache, which holds 8 or
// 12 of them, and weights pass through it, too: so many rows may share one. (Rows of 2048 bytes,
// which share two, lose nothing.)
constexpr int64_t kSetStride = 4096, kMaxRowsOfSet = 4;

// Activations [rows, K] as a product reads them: as they are, or copied a block of rows at a time,
// once for all panels of a claim. They are copied where T has to be widened, and where the rows of
// a tile would displace each other from the cache: 14 rows of 2048 elements of bf16 took 1.3 times
// as long in place.
template <class T>
class InputRows {
 public:
  InputRows(const void* x, int64_t k, int64_t tile_rows, Arena& arena)
      : x_(static_cast<const T*>(x)),
        k_(k),
        is_copied_(!std::is_same_v<Input<T>, T> ||
                   (tile_rows > kMaxRowsOfSet && k * int64_t(sizeof(T)) % kSetStride == 0)),
        stride_(is_copied_ ? round_up(k, kLanes) + kCacheLine / int64_t(sizeof(Input<T>)) : k),
        arena_(arena) {}

  int64_t stride() const { return stride_; }

  // The address of row 0, of which only rows [begin, end) may be read.
  const Input<T>* block(int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<Input<T>, T>) {
      if (!is_copied_) return x_;
    }
    if (begin != begin_ || end != end_) copy(begin, end);
    return copied_ - begin * stride_;
  }

 private:
  void copy(int64_t begin, int64_t end) {
    begin_ = begin;
    end_ = end;
    copied_ = arena_.take<Input<T>>((end - begin) * stride_);
    for (int64_t row = begin; row < end; row++) {
      const T* from = x_ + row * k_;
      Input<T>* to = copied_ + (row - begin) * stride_;
      if constexpr (std::is_same_v<Input<T>, T>) {
        __builtin_memcpy(to, from, size_t(k_) * sizeof(T));
      } else {
        for (int64_t i = 0; i < k_; i += kLanes) {
          store(to + i, load_some(from + i, int(k_ - i < kLanes ? k_ - i : kLanes)));
        }
      }
    }
  }

  const T* x_;
  const int64_t k_;
  const bool is_copied_;
  const int64_t stride_;
  Arena& arena_;
  int64_t begin_ = 0, end_ = 0;
  Input<T>* copied_ = nullptr;
};

// Computes units [begin, end). Rows are divided evenly into tiles of at most kTileRows, and tiles
// into row blocks. A unit with one row tile prefetches its own panel ahead. A unit with
// several prefetches the next panel, spread evenly over the tiles; the last unit of the thread's
// share prefetches the next weight's first panel instead.
template <class T, class MakeEpilogue>
inline void run_panels(const void* x, const void* w, const Grid& grid, int64_t begin, int64_t end,
                       Worker& worker, const MakeEpilogue& make_epilogue) {
  const int64_t rows = grid.rows;
  const int64_t bytes = panel_bytes(WeightTraits<T>::kFormat, grid.k);
  constexpr int kTileRows = WeightTraits<T>::kTileRows;
  static constexpr FloatTiles<T> kTiles =
      make_float_tiles<T>(std::make_integer_sequence<int, kTileRows>());
  const int64_t tiles = ceil_div(rows, kTileRows);
  InputRows<typename WeightTraits<T>::Act> inputs(x, grid.k, ceil_div(rows, tiles), worker.arena);
  PanelProduct<T> product{nullptr, inputs.stride(), nullptr, grid.k};
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t panel = unit % grid.panels, block = unit / grid.panels;
    const char* own = static_cast<const char*>(w) + panel * bytes;
    product.w = reinterpret_cast<const T*>(own);
    auto epilogue = make_epilogue(panel);
    int64_t first_tile = block * tiles / grid.row_blocks;
    int64_t last_tile = (block + 1) * tiles / grid.row_blocks;
    product.x = inputs.block(first_tile * rows / tiles, last_tile * rows / tiles);
    SpreadPrefetch prefetch;
    int64_t count = last_tile - first_tile;
    const CacheLevels later = levels_of_next_panel(count);
    if (count == 1) {
      prefetch =
          rows / tiles < kMinRowsForBothLevels
              ? SpreadPrefetch{own + kPrefetchDistance, kStepBytes<T>}
              : SpreadPrefetch{own + kFarPrefetchDistance, kStepBytes<T>, CacheLevels::kBoth};
    } else if (unit + 1 == worker.share_end) {
      if (!worker.prefetch.empty()) {
        prefetch = {worker.prefetch.at, kStepBytes<T> / count, later};
      }
      worker.prefetch.at += bytes;
    } else if (panel + 1 < grid.panels) {
      prefetch = {own + bytes, kStepBytes<T> / count, later};
    }
    UpcomingBlocks* upcoming = count >= kMinTilesToPrefetchKv ? &worker.upcoming : nullptr;
    const char* start = prefetch.at;
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      const int64_t row = tile * rows / tiles;
      const int num_rows = int((tile + 1) * rows / tiles - row);
      Vec sums[kTileRows][kPanelVecs];
      kTiles.of_rows[num_rows - 1](product, row, prefetch, upcoming, sums);
      for (int i = 0; i < num_rows; i++) epilogue(row + i, sums[i]);
      if (prefetch.bytes_per_step != 0) {
        prefetch.at = start + (tile + 1 - first_tile) * bytes / count;
      }
    }
  }
}

// How the kernels below, which are written for any product, find and multiply weights of floats.
template <class T>
struct FloatProduct {
  // Row `row` of activations [rows, K].
  static const void* row(const void* x, int64_t row, int64_t k) {
    return static_cast<const typename WeightTraits<T>::Act*>(x) + row * k;
  }
  // The packed weight of one expert.
  static const void* expert(const void* w, int64_t expert, int64_t panels, int64_t k) {
    return static_cast<const char*>(w) + expert * panels * panel_bytes(WeightTraits<T>::kFormat, k);
  }
  template <class MakeEpilogue>
  static void run(const void* x, const void* w, const Grid& grid, int64_t begin, int64_t end,
                  Worker& worker, const MakeEpilogue& make_epilogue) {
    run_panels<T>(x, w, grid, begin, end, worker, make_epilogue);
  }
};

template <class T>
struct LinearEpilogue {
  const LinearTask& task;
  int64_t column;

  void finish(int64_t row, int64_t at, Vec value) const {
    int n = int(task.n - at < kLanes ? task.n - at : kLanes);
    if (n <= 0) return;
    int64_t index = row * task.n + at;
    if (task.bias != nullptr) value = add(value, load_some(task.bias + at, n));
    if (task.scale != 1.0f) value = mul(value, set1(task.scale));
    if (task.residual != nullptr) value = add(value, load_some(task.residual + index, n));
    if (task.out_is_f32) {
      store_some(static_cast<float*>(task.out) + index, value, n);
    } else {
      store_some(static_cast<T*>(task.out) + index, value, n);
    }
  }
  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    for (int j = 0; j < kPanelVecs; j++) finish(row, column + j * kLanes, columns[j]);
  }
};

// P is how weights are multiplied, T the type of the activations.
template <class P, class T>
void linear_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const LinearUnits*>(context);
  const LinearTask& task = *units.task;
  P::run(task.x, task.w, units.grid, begin, end, worker, [&](int64_t panel) {
    return LinearEpilogue<T>{task, panel * kPanel};
  });
}

template <class T, Activation A>
struct GatedEpilogue {
  const GatedTask& task;
  int64_t column;

  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    Vec gate = columns[0], up = columns[1];
    int n = int(task.f - column < kLanes ? task.f - column : kLanes);
    if (task.bias != nullptr) {
      gate = add(gate, load_some(task.bias + column, n));
      up = add(up, load_some(task.bias + task.f + column, n));
    }
    store_some(static_cast<T*>(task.out) + row * task.f + column, gated(gate, up), n);
  }
  static Vec gated(Vec gate, Vec up) {
    if constexpr (A == Activation::kClampedSwiglu) return clamped_swiglu(gate, up);
    if constexpr (A == Activation::kSilu) return mul(silu(gate), up);
    if constexpr (A == Activation::kGeluTanh) return mul(gelu_tanh(gate), up);
    if constexpr (A == Activation::kGelu) return mul(gelu(gate), up);
  }
};

template <class P, class T, Activation A>
void gated_units_as(const GatedUnits& units, int64_t begin, int64_t end, Worker& worker) {
  const GatedTask& task = *units.task;
  P::run(task.x, task.w, units.grid, begin, end, worker, [&](int64_t panel) {
    return GatedEpilogue<T, A>{task, panel * kLanes};
  });
}

template <class P, class T>
void gated_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const GatedUnits*>(context);
  switch (units.task->activation) {
    case Activation::kSilu:
      return gated_units_as<P, T, Activation::kSilu>(units, begin, end, worker);
    case Activation::kGeluTanh:
      return gated_units_as<P, T, Activation::kGeluTanh>(units, begin, end, worker);
    case Activation::kGelu:
      return gated_units_as<P, T, Activation::kGelu>(units, begin, end, worker);
    case Activation::kClampedSwiglu:
      return gated_units_as<P, T, Activation::kClampedSwiglu>(units, begin, end, worker);
  }
}

// Updates the row's argmax; stores the logits only for rows that need them (`kept`).
struct LogitsEpilogue {
  const LogitsTask& task;
  RowBest* best;
  int64_t column;

  Vec valid(int64_t at, Vec value) const {
    int64_t n = task.product.n - at;
    if (n >= kLanes) return value;
    return select(first(n > 0 ? int(n) : 0), value, set1(-__builtin_inff()));
  }
  // Without the token that no row chooses.
  Vec candidates(int64_t at, Vec value) const {
    const int64_t lane = task.banned - at;
    if (lane < 0 || lane >= kLanes) return value;
    return select(from_bits(1u << lane), set1(-__builtin_inff()), value);
  }
  void update(RowBest& row, const Vec (&columns)[kPanelVecs], Vec largest) const {
    float value = reduce_max(largest);
    for (int j = 0; j < kPanelVecs; j++) {
      uint32_t lanes = bits(cmp_eq(columns[j], set1(value)));
      if (lanes == 0) continue;
      int32_t id = int32_t(column + j * kLanes + __builtin_ctz(lanes));
      if (value == row.value && id > row.id) return;  // panels are claimed in any order
      row.value = value;
      row.id = id;
      return;
    }
  }
  // Applies the model's transform. `largest_bits` is taken from the product before it.
  Vec transformed(Vec value) const {
    const LogitTransform& transform = task.transform;
    if (transform.divisor != 1.0f) value = div(value, set1(transform.divisor));
    if (transform.soft_cap == 0.0f) return value;
    return mul(tanh_vec(div(value, set1(transform.soft_cap))), set1(transform.soft_cap));
  }
  static VecI magnitude(Vec a) { return and_i(as_int(a), set1_i(0x7fffffff)); }

  void operator()(int64_t row, const Vec (&product)[kPanelVecs]) const {
    static_assert(kPanelVecs == 2, "the tile below is two vectors wide");
    RowBest& mine = best[row];
    VecI size = max_u(magnitude(product[0]), magnitude(product[1]));
    uint32_t largest_bits = reduce_max_u(size);
    if (largest_bits > mine.largest_bits) mine.largest_bits = largest_bits;
    const Vec columns[2] = {valid(column, transformed(product[0])),
                            valid(column + kLanes, transformed(product[1]))};
    const Vec able[2] = {candidates(column, columns[0]), candidates(column + kLanes, columns[1])};
    Vec largest = max(able[0], able[1]);
    // cmp_ge is false for NaN lanes, so they cannot mask the other lanes; the row is rejected
    // through largest_bits.
    if (any(cmp_ge(largest, set1(mine.value)))) update(mine, able, largest);
    if (float* kept = task.kept[row]; kept != nullptr) {
      store(kept + column, columns[0]);
      store(kept + column + kLanes, columns[1]);
    }
  }
};

template <class P>
void logits_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const LogitsTask*>(context);
  const LinearTask& product = task.product;
  RowBest* best = task.best + worker.index * best_stride(product.rows);
  const Grid grid{product.rows, product.k, ceil_div(product.n, kPanel), 1};
  P::run(product.x, product.w, grid, begin, end, worker, [&](int64_t panel) {
    return LogitsEpilogue{task, best, panel * kPanel};
  });
}

}  // namespace cadenza::CADENZA_ISA
