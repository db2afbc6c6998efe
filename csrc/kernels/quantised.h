// Products of quantised activations with quantised weights: the arithmetic of core/quantised.h.
//
// Units, epilogues and prefetching are those of kernels/linear.h. A column's codes of one group are
// reduced to an exact integer, so only the order of the groups matters, and it is ascending.
#pragma once

#include "core/quantised.h"
#include "kernels/experts.h"
#include "kernels/roofline.h"
#include "vec/dot.h"

namespace cadenza::CADENZA_ISA {

// How a format stores a group of a panel. `dot_group` adds the dots of MR rows with NR column vectors
// of stored codes to `dots`, which begin with `start`; `correct` completes them in f32, exactly.
struct Int8Codes {
  static constexpr int64_t kGroupBytes = kInt8GroupBytes;

  // Stored codes are 128 too large.
  static int32_t start(int32_t sum) { return (kCodeBias - 128) * sum; }
  struct Zeros {
    Zeros(const uint8_t*, int) {}
  };
  static Vec correct(Vec dots, const Zeros&, Vec) { return dots; }

  template <int MR, int NR>
  [[gnu::always_inline]] static void dot_group(VecI (&dots)[MR][NR], const uint8_t* w,
                                               const uint8_t* x, int64_t row_stride) {
#pragma GCC unroll 8
    for (int step = 0; step < kGroup / 4; step++) {
      CodeVec columns[NR];
      for (int j = 0; j < NR; j++) columns[j] = load_codes(w + (step * kPanelVecs + j) * 64);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        CodeOperand codes =
            broadcast_codes(reinterpret_cast<const int8_t*>(x + i * row_stride + 4 * step));
#pragma GCC unroll 2
        for (int j = 0; j < NR; j++) dots[i][j] = dot_codes(dots[i][j], columns[j], codes);
      }
    }
  }
  static const uint16_t* scales(const uint8_t* group) {
    return reinterpret_cast<const uint16_t*>(group + kGroup * kPanel);
  }
  // Element i of a group's column.
  static float element(const uint8_t* group, int64_t column, int64_t i) {
    int code = group[(i / 4 * kPanel + column) * 4 + i % 4];
    return float(code - 128) * f16_to_f32(scales(group)[column]);
  }
};

struct Int4Codes {
  static constexpr int64_t kGroupBytes = kInt4GroupBytes;

  static int32_t start(int32_t) { return 0; }
  struct Zeros {
    Vec points;
    Zeros(const uint8_t* group, int vector)
        : points(load_u8(zero_points(group) + vector * kLanes)) {}
  };
  // Integers below 2^24, so that nothing is rounded.
  static Vec correct(Vec dots, const Zeros& zeros, Vec sum) { return fnma(zeros.points, sum, dots); }

  template <int MR, int NR>
  [[gnu::always_inline]] static void dot_group(VecI (&dots)[MR][NR], const uint8_t* w,
                                               const uint8_t* x, int64_t row_stride) {
#pragma GCC unroll 4
    for (int step = 0; step < kGroup / 8; step++) {
      CodeVec columns[2][NR];
      for (int j = 0; j < NR; j++) {
        load_nibbles(w + (step * kPanelVecs + j) * 64, columns[0][j], columns[1][j]);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
          const uint8_t* at = x + i * row_stride + 8 * step + 4 * half;
          CodeOperand codes = broadcast_codes(reinterpret_cast<const int8_t*>(at));
#pragma GCC unroll 2
          for (int j = 0; j < NR; j++) dots[i][j] = dot_codes(dots[i][j], columns[half][j], codes);
        }
      }
    }
  }
  static const uint16_t* scales(const uint8_t* group) {
    return reinterpret_cast<const uint16_t*>(group + kGroup * kPanel / 2);
  }
  static const uint8_t* zero_points(const uint8_t* group) {
    return group + kGroup * kPanel / 2 + kPanel * 2;
  }
  static float element(const uint8_t* group, int64_t column, int64_t i) {
    int byte = group[(i / 8 * kPanel + column) * 4 + i % 4];
    int code = i % 8 < 4 ? byte & 15 : byte >> 4;
    return float(code - zero_points(group)[column]) * f16_to_f32(scales(group)[column]);
  }
};

struct QuantisedProduct {
  const uint8_t* x;  // [rows, code_row_bytes(K)]
  const uint8_t* w;  // the panel
  int64_t k;
};

// Prefetches the bytes of one group.
[[gnu::always_inline]] inline void prefetch_group(SpreadPrefetch& prefetch) {
  for (int64_t at = 0; at < prefetch.bytes_per_step; at += kCacheLine) {
    __builtin_prefetch(prefetch.at + at, 0, 3);
  }
  prefetch.at += prefetch.bytes_per_step;
}

// Folds the groups of MR rows and NR column vectors from vector `first` on.
template <class F, int MR, int NR>
[[gnu::always_inline]] inline void fold_groups(Vec (&sums)[MR][NR], const QuantisedProduct& product,
                                               int64_t row, int first, SpreadPrefetch prefetch) {
  const int64_t groups = ceil_div(product.k, kGroup), stride = code_row_bytes(product.k);
  const uint8_t* x = product.x + row * stride;
  const uint8_t* terms = x + groups * kGroup;
  const uint8_t* w = product.w;
  clear(sums);
  for (int64_t g = 0; g < groups; g++) {
    VecI dots[MR][NR];
    Vec scales[MR], code_sums[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      GroupTerms term;
      __builtin_memcpy(&term, terms + i * stride, sizeof(term));
      scales[i] = set1(term.scale);
      code_sums[i] = set1(float(term.sum));
      for (int j = 0; j < NR; j++) dots[i][j] = set1_i(uint32_t(F::start(term.sum)));
    }
    F::dot_group(dots, w + first * 64, x, stride);
#pragma GCC unroll 2
    for (int j = 0; j < NR; j++) {
      const Vec column = load_f16(F::scales(w) + (first + j) * kLanes);
      const typename F::Zeros zeros(w, first + j);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        Vec dot = F::correct(from_i32(dots[i][j]), zeros, code_sums[i]);
        sums[i][j] = fma(mul(dot, scales[i]), column, sums[i][j]);
      }
    }
    prefetch_group(prefetch);
    x += kGroup;
    terms += sizeof(GroupTerms);
    w += F::kGroupBytes;
  }
}

// Computes MR rows of a panel and calls epilogue(row, columns) for each row.
template <class F, int MR, class Epilogue>
[[gnu::noinline]] void quantised_tile(const QuantisedProduct& product, int64_t row,
                                      SpreadPrefetch prefetch, const Epilogue& epilogue) {
  Vec sums[MR][kPanelVecs];
  for (int j = 0; j < kPanelVecs; j += kDotVecs) {
    Vec part[MR][kDotVecs];
    fold_groups<F>(part, product, row, j, j == 0 ? prefetch : SpreadPrefetch{});
    for (int i = 0; i < MR; i++) {
      for (int v = 0; v < kDotVecs; v++) sums[i][j + v] = part[i][v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) epilogue(row + i, sums[i]);
}

// What a unit of `count` row tiles prefetches: as run_panels of kernels/linear.h, group by group.
inline SpreadPrefetch prefetch_of_unit(const uint8_t* panel, int64_t bytes, int64_t group_bytes,
                                       int64_t count, bool is_last_of_share, bool has_next,
                                       Worker& worker) {
  const char* own = reinterpret_cast<const char*>(panel);
  if (count == 1) return {own + kPrefetchDistance, group_bytes};
  const int64_t share = round_up(ceil_div(group_bytes, count), kCacheLine);
  if (is_last_of_share) {
    SpreadPrefetch prefetch;
    if (!worker.prefetch.empty()) prefetch = {worker.prefetch.at, share};
    worker.prefetch.at += bytes;
    return prefetch;
  }
  return has_next ? SpreadPrefetch{own + bytes, share} : SpreadPrefetch{};
}

// Computes units [begin, end), divided into row tiles and row blocks as in kernels/linear.h.
template <class F, class MakeEpilogue>
inline void run_quantised_panels(const void* x, const void* w, const Grid& grid, int64_t begin,
                                 int64_t end, Worker& worker, const MakeEpilogue& make_epilogue) {
  const int64_t rows = grid.rows, tiles = ceil_div(rows, kDotRows);
  const int64_t bytes = ceil_div(grid.k, kGroup) * F::kGroupBytes;
  QuantisedProduct product{static_cast<const uint8_t*>(x), nullptr, grid.k};
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t panel = unit % grid.panels, block = unit / grid.panels;
    product.w = static_cast<const uint8_t*>(w) + panel * bytes;
    auto epilogue = make_epilogue(panel);
    int64_t first_tile = block * tiles / grid.row_blocks;
    int64_t last_tile = (block + 1) * tiles / grid.row_blocks, count = last_tile - first_tile;
    SpreadPrefetch prefetch =
        prefetch_of_unit(product.w, bytes, F::kGroupBytes, count, unit + 1 == worker.share_end,
                         panel + 1 < grid.panels, worker);
    const char* start = prefetch.at;
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      int64_t row = tile * rows / tiles, next = (tile + 1) * rows / tiles;
      with_count<kDotRows>(int(next - row), [&](auto n) {
        quantised_tile<F, decltype(n)::value>(product, row, prefetch, epilogue);
      });
      if (prefetch.bytes_per_step != 0) {
        prefetch.at = start + (tile + 1 - first_tile) * bytes / count;
      }
    }
  }
}

template <class F, class T>
void quantised_linear_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const LinearUnits*>(context);
  const LinearTask& task = *units.task;
  run_quantised_panels<F>(task.x, task.w, units.grid, begin, end, worker, [&](int64_t panel) {
    return LinearEpilogue<T>{task, panel * kPanel};
  });
}

template <class T>
struct AnyGatedEpilogue {
  const GatedTask& task;
  int64_t column;

  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    finish_gated<T>(task, column, row, columns);
  }
};

template <class F, class T>
void quantised_gated_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const GatedUnits*>(context);
  const GatedTask& task = *units.task;
  run_quantised_panels<F>(task.x, task.w, units.grid, begin, end, worker, [&](int64_t panel) {
    return AnyGatedEpilogue<T>{task, panel * kLanes};
  });
}

template <class F>
void quantised_logits_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& task = *static_cast<const LogitsTask*>(context);
  const LinearTask& product = task.product;
  RowBest* best = task.best + worker.index * product.rows;
  const Grid grid{product.rows, product.k, ceil_div(product.n, kPanel), 1};
  run_quantised_panels<F>(product.x, product.w, grid, begin, end, worker, [&](int64_t panel) {
    return LogitsEpilogue{task, best, panel * kPanel};
  });
}

template <class F>
inline const uint8_t* quantised_expert(const void* w, int64_t expert, int64_t panels, int64_t k) {
  return static_cast<const uint8_t*>(w) + expert * panels * ceil_div(k, kGroup) * F::kGroupBytes;
}

inline const uint8_t* gathered_codes(const ExpertGroups& experts, int64_t row, int64_t k) {
  return static_cast<const uint8_t*>(experts.x) + row * code_row_bytes(k);
}

// A unit is one panel of one expert for one block of its rows.
template <class F, class T>
void quantised_grouped_gated_units(const void* context, int64_t begin, int64_t end,
                                   Worker& worker) {
  const auto& units = *static_cast<const GroupedGatedUnits*>(context);
  const ExpertGroups& experts = units.experts;
  GatedTask task = units.task->product;
  Worker within{worker.index, worker.arena};  // share_end counts the job's units
  for (int64_t g = 0; g < experts.num_groups; g++) {
    const ExpertGroup& group = experts.groups[g];
    int64_t first = begin - group.first_unit, last = end - group.first_unit;
    if (first < 0) first = 0;
    if (last > group.grid.units()) last = group.grid.units();
    if (first >= last) continue;
    const float* bias = units.task->product.bias;
    task.bias = bias == nullptr ? nullptr : bias + group.expert * 2 * task.f;
    run_quantised_panels<F>(
        gathered_codes(experts, group.first, task.k),
        quantised_expert<F>(task.w, group.expert, group.grid.panels, task.k), group.grid, first,
        last, within, [&](int64_t panel) {
          return GroupedGatedEpilogue<T>{task, experts.pairs + group.first, panel * kLanes};
        });
  }
}

// A unit is one panel of every expert for all rows.
template <class F, class T>
void quantised_grouped_linear_units(const void* context, int64_t begin, int64_t end,
                                    Worker& worker) {
  const auto& units = *static_cast<const GroupedLinearUnits*>(context);
  const ExpertGroups& experts = units.experts;
  const LinearTask& task = units.task->product;
  const int64_t stride = (end - begin) * kPanel, panels = ceil_div(task.n, kPanel);
  float* partials = worker.arena.take<float>(units.task->choice.num_pairs(task.rows) * stride);
  Worker within{worker.index, worker.arena};  // share_end counts the job's units
  for (int64_t g = 0; g < experts.num_groups; g++) {
    const ExpertGroup& group = experts.groups[g];
    const float* bias = task.bias == nullptr ? nullptr : task.bias + group.expert * task.n;
    run_quantised_panels<F>(
        gathered_codes(experts, group.first, task.k),
        quantised_expert<F>(task.w, group.expert, panels, task.k),
        {group.rows, task.k, panels, 1}, begin, end, within, [&](int64_t panel) {
          int64_t column = panel * kPanel;
          return PartialEpilogue{partials + (panel - begin) * kPanel, stride,
                                 experts.pairs + group.first,
                                 bias == nullptr ? nullptr : bias + column, task.n - column};
        });
  }
  combine_slots<T>(*units.task, begin, end, partials);
}

// Quantises up to 32 elements.
template <class T>
inline void quantise_group(const T* x, int64_t count, int8_t* codes, GroupTerms& terms) {
  Vec low = load_some(x, int(count < kLanes ? count : kLanes)), high = zero();
  if (count > kLanes) high = load_some(x + kLanes, int(count - kLanes));
  const VecI magnitude = set1_i(0x7fffffff);
  uint32_t largest_bits =
      reduce_max_u(max_u(and_i(as_int(low), magnitude), and_i(as_int(high), magnitude)));
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof(largest));
  if (largest_bits < kSmallestLargest || largest_bits >= 0x7f800000u) {
    __builtin_memset(codes, 0, kGroup);
    terms = {largest_bits < kSmallestLargest ? 0.0f : __builtin_nanf(""), 0};
    return;
  }
  Vec inverse = set1(127.0f / largest);
  low = round_even(mul(low, inverse));
  high = round_even(mul(high, inverse));
  store_codes(codes, low);
  store_codes(codes + kLanes, high);
  terms = {largest / 127.0f, int32_t(reduce_add(add(low, high)))};
}

// A unit is one row.
template <class T>
void quantise_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const QuantiseTask*>(context);
  const int64_t groups = ceil_div(task.k, kGroup);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(task.x) + row * task.k;
    uint8_t* out = task.out + row * code_row_bytes(task.k);
    for (int64_t g = 0; g < groups; g++) {
      GroupTerms terms;
      quantise_group(x + g * kGroup, task.k - g * kGroup < kGroup ? task.k - g * kGroup : kGroup,
                     reinterpret_cast<int8_t*>(out + g * kGroup), terms);
      __builtin_memcpy(out + groups * kGroup + g * int64_t(sizeof(terms)), &terms, sizeof(terms));
    }
  }
}

// A unit is one row of the embedding.
template <class F>
void quantised_embed_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const EmbedTask*>(context);
  const int64_t bytes = ceil_div(task.width, kGroup) * F::kGroupBytes;
  for (int64_t row = begin; row < end; row++) {
    float* out = task.out + row * task.width;
    int64_t id = task.token_ids[row];
    bool is_token = id >= 0 && id < task.vocab;
    const uint8_t* panel = static_cast<const uint8_t*>(task.table) + (is_token ? id / kPanel : 0) * bytes;
    for (int64_t i = 0; i < task.width; i++) {
      const uint8_t* group = panel + i / kGroup * F::kGroupBytes;
      out[i] = is_token ? F::element(group, id % kPanel, i % kGroup) * task.scale : 0.0f;
    }
  }
}

// The register tile without its loads: the upper bound of the products' dots.
inline void multiply_codes_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& task = *static_cast<const MultiplyTask*>(context);
  const auto* seeds = static_cast<const uint8_t*>(task.seeds);
  VecI dots[kDotRows][kDotVecs];
  for (int i = 0; i < kDotRows; i++) {
    for (int j = 0; j < kDotVecs; j++) dots[i][j] = set1_i(uint32_t(i * kDotVecs + j));
  }
  const CodeVec weight = load_codes(seeds);
  const CodeOperand operand = broadcast_codes(reinterpret_cast<const int8_t*>(seeds));
  for (int64_t step = 0; step < (end - begin) * task.steps; step++) {
#pragma GCC unroll 8
    for (int i = 0; i < kDotRows; i++)
#pragma GCC unroll 2
      for (int j = 0; j < kDotVecs; j++) dots[i][j] = dot_codes(dots[i][j], weight, operand);
  }
  observe(dots);
  constexpr int64_t kPerStep = 2 * 4 * kLanes * kDotRows * kDotVecs;
  __atomic_fetch_add(task.operations, (end - begin) * task.steps * kPerStep, __ATOMIC_RELAXED);
}

constexpr IntegerKernels make_integer_kernels(const char* isa) {
  using A = Int8Codes;
  using B = Int4Codes;
  return {isa,
          kDotRows,
          {quantise_units<bf16>, quantise_units<float>},
          multiply_codes_units,
          {quantised_embed_units<A>, quantised_embed_units<B>},
          {{quantised_linear_units<A, bf16>, quantised_linear_units<A, float>},
           {quantised_linear_units<B, bf16>, quantised_linear_units<B, float>}},
          {{quantised_gated_units<A, bf16>, quantised_gated_units<A, float>},
           {quantised_gated_units<B, bf16>, quantised_gated_units<B, float>}},
          {quantised_logits_units<A>, quantised_logits_units<B>},
          {{quantised_grouped_gated_units<A, bf16>, quantised_grouped_gated_units<A, float>},
           {quantised_grouped_gated_units<B, bf16>, quantised_grouped_gated_units<B, float>}},
          {{quantised_grouped_linear_units<A, bf16>, quantised_grouped_linear_units<A, float>},
           {quantised_grouped_linear_units<B, bf16>, quantised_grouped_linear_units<B, float>}}};
}

}  // namespace cadenza::CADENZA_ISA
