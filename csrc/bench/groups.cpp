// Times products of int8 codes whose groups, of weights and activations alike, are longer than in
// the formats: what a product gains by folding fewer of them. One thread, its CPU time;
// benchmarks/int8_groups.py measures what such groups cost in quality.
//
//   make bench-groups
//
// With groups of 32 one in 64 has second codes, as in the formats; with longer ones two products of
// 32 codes stand for elements that are kept apart, and for their second codes.
#define CADENZA_ISA groups_bench
#ifdef __AVX512VNNI__
#define CADENZA_VEC_AVX512
#elif defined(__AVX2__)
#define CADENZA_VEC_AVX2
#endif
#include "kernels/quantised.h"

#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace cadenza::CADENZA_ISA {
namespace {

using F = Codes<kInt8Format>;
constexpr int kFewRows = kDotRows < 4 ? kDotRows : 4;
constexpr int64_t kScaleBytes = kPanel * 2;

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

struct Shape {
  const char* name;
  int64_t n, k;
};

// A group has Length times 32 elements.
template <int Length>
struct LongGroups {
  static constexpr int64_t kBytes = Length * F::kFormat.code_bytes() + kScaleBytes;
  static int64_t count(int64_t k) { return ceil_div(k, kGroup * Length); }
  static int64_t panel_bytes(int64_t k) { return count(k) * kBytes; }
};

template <int Length, int MR, int NR>
[[gnu::noinline]] void tile(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t k,
                            int first, Vec (*out)[kPanelVecs]) {
  using Groups = LongGroups<Length>;
  const int64_t groups = ceil_div(k, kGroup);
  const uint8_t* terms = x + groups * kGroup;
  Vec sums[MR][NR];
  clear(sums);
  for (int64_t g = 0; g < Groups::count(k); g++, w += Groups::kBytes) {
    VecI dots[MR][NR];
    float scales[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      GroupTerms term;
      std::memcpy(&term, terms + i * stride + g * int64_t(sizeof(term)), sizeof(term));
      scales[i] = term.scale;
      const auto start = uint32_t(F::start(term.totals[0] + term.totals[1]));
      for (int j = 0; j < NR; j++) dots[i][j] = set1_i(start);
    }
    const int64_t left = groups - g * Length, parts = left < Length ? left : Length;
    for (int64_t part = 0; part < parts; part++, x += kGroup) {
      add_byte_dots<F>(dots, w + part * F::kFormat.code_bytes() + first * 64, x, stride);
    }
    const uint8_t* column_scales = w + Length * F::kFormat.code_bytes();
#pragma GCC unroll 2
    for (int j = 0; j < NR; j++) {
      const Vec column = F::load_scales(column_scales, nullptr, (first + j) * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        sums[i][j] = fma(mul(from_i32(dots[i][j]), set1(scales[i])), column, sums[i][j]);
      }
    }
  }
  for (int i = 0; i < MR; i++) {
    for (int j = 0; j < NR; j++) out[i][first + j] = sums[i][j];
  }
}

// The products of 32 codes for a row that are apart from its groups.
template <int Length>
void add_extra(const uint8_t* x, const uint8_t* w, Vec (&sums)[kPanelVecs]) {
  Vec own[1][kPanelVecs] = {{sums[0], sums[1]}};
  for (int i = 0; i < (Length == 1 ? 1 : 2); i++) {
    const uint8_t* scales = w + Length * F::kFormat.code_bytes();
    const GroupPart part{w, scales, nullptr, nullptr, x + i * kGroup, 0};
    fold_part<F, 1, kPanelVecs>(own, part, 0, {0.5f}, {3});
  }
  for (int j = 0; j < kPanelVecs; j++) sums[j] = own[0][j];
}

template <int Length, int MR>
void rows_of_panel(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t k, float* out) {
  Vec sums[MR][kPanelVecs];
  constexpr int NR = vecs_of_tile(MR);
  for (int j = 0; j < kPanelVecs; j += NR) tile<Length, MR, NR>(x, stride, w, k, j, sums);
  for (int i = 0; i < MR; i++) {
    for (int64_t span = 0; span < num_remainders(k); span++) {
      add_extra<Length>(x + i * stride + span * 64, w + span * LongGroups<Length>::kBytes, sums[i]);
    }
    for (int j = 0; j < kPanelVecs; j++) store(out + i * kPanel + j * kLanes, sums[i][j]);
  }
}

struct Rows {
  int count;
  void (*run)(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t k, float* out);
};
template <int Length>
Rows rows_of_tile(int64_t rows) {
  if (rows < 64) return {kFewRows, rows_of_panel<Length, kFewRows>};
  return {kDotRows, rows_of_panel<Length, kDotRows>};
}

// Seconds of a product with `rows` rows, the best of some.
template <int Length>
double seconds(const Shape& shape, int64_t rows) {
  const int64_t panels = shape.n / kPanel, bytes = LongGroups<Length>::panel_bytes(shape.k);
  const int64_t stride = code_row_bytes(shape.k) + 64;
  static uint8_t* weights = static_cast<uint8_t*>(std::aligned_alloc(64, size_t(1) << 28));
  std::vector<uint8_t> x(size_t(rows * stride), 1);
  const int64_t copies = std::max<int64_t>(1, (int64_t(1) << 27) / (panels * bytes));
  static bool is_filled = false;
  if (!is_filled) std::memset(weights, 1, size_t(1) << 28);
  is_filled = true;
  alignas(64) float out[kDotRows * kPanel];
  double best = 1e9;
  for (int repeat = 0; repeat < 5; repeat++) {
    const double start = now();
    for (int64_t copy = 0; copy < (rows > 32 ? 1 : copies); copy++) {
      for (int64_t panel = 0; panel < panels; panel++) {
        const uint8_t* w = weights + (copy * panels + panel) * bytes;
        for (int64_t row = 0; row < rows;) {
          const uint8_t* from = x.data() + row * stride;
          const Rows tile = rows_of_tile<Length>(rows);
          tile.run(from, stride, w, shape.k, out);
          row += tile.count;
        }
      }
    }
    observe(out);
    best = std::min(best, (now() - start) / double(rows > 32 ? 1 : copies));
  }
  return best;
}

void run(const Shape& shape) {
  std::printf("%s, %ld x %ld: Gop/s\n", shape.name, long(shape.n), long(shape.k));
  for (int64_t rows : {8, 32, 192}) {
    const double each[] = {seconds<1>(shape, rows), seconds<2>(shape, rows),
                           seconds<4>(shape, rows), seconds<8>(shape, rows)};
    std::printf("  %3ld rows:", long(rows));
    const double operations = 2e-9 * double(rows * shape.n * shape.k);
    for (int i = 0; i < 4; i++) {
      std::printf("  %d: %.0f (%.2f x)", 32 << i, operations / each[i], each[0] / each[i]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace cadenza::CADENZA_ISA

int main() {
  using cadenza::CADENZA_ISA::run;
  run({"135M gate and up", 3072, 576});
  run({"135M down", 576, 1536});
  run({"1B gate and up", 4096, 2048});
  return 0;
}
