// Times the operations of an image tower on one thread, by its CPU time: attention over the rows of an
// image, in GFLOP/s beside what the arithmetic units reach, then norms and activations in ns an element.
//
//   make bench-encoder ARGS="[--rows 15376] [--heads 16] [--size 72] [--queries 64] [--f32]"
#define CADENZA_ISA encoder_bench
#ifdef __AVX512F__
#define CADENZA_VEC_AVX512
#elif defined(__AVX2__)
#define CADENZA_VEC_AVX2
#elif defined(__aarch64__)
#define CADENZA_VEC_NEON
#endif
#include "kernels/encoder.h"
#include "kernels/encoder_attention.h"
#include "kernels/roofline.h"

#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cadenza::CADENZA_ISA {
namespace {

struct Setup {
  int64_t rows = 15376, heads = 16, size = 72, queries = kEncodeQueries;
};

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Seconds of the best of some runs.
template <class Body>
double best_of(int repeats, Body&& body) {
  double best = 1e9;
  for (int i = 0; i < repeats; i++) {
    const double start = now();
    body();
    best = std::min(best, now() - start);
  }
  return best;
}

template <class T>
T* numbers(Arena& memory, int64_t count) {
  T* values = memory.take<T>(round_up(count, kLanes));
  float lanes[kLanes];
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int j = 0; j < kLanes; j++) lanes[j] = float((i + j) * 37 % 101) / 50.0f - 1.0f;
    Elem<T>::store(values + i, CADENZA_ISA::load(lanes));
  }
  return values;
}

template <class T>
void time_attention(const Setup& setup, Worker& worker) {
  const int64_t rows = round_up(setup.rows, kLanes), width = setup.heads * setup.size;
  Arena memory;
  T *queries = numbers<T>(memory, rows * width), *keys = numbers<T>(memory, rows * width);
  T* values = numbers<T>(memory, rows * setup.heads * round_up(setup.size, kLanes));
  T* out = numbers<T>(memory, rows * width);
  const EncodeTask task{{setup.heads, setup.size, rows, queries, keys, values},
                        setup.queries, 0, setup.rows, nullptr, 0.125f, out};
  const EncodeUnits units{&task, std::min<int64_t>(setup.queries, kEncodeQueries)};
  const double seconds = best_of(5, [&] { encode_units<T>(&units, 0, units.units(), worker); });
  const double operations = 4.0 * double(setup.queries) * double(setup.rows) * double(width);
  int64_t multiplied = 0;
  const MultiplyTask rate{keys, 1 << 18, &multiplied};
  const double peak = best_of(5, [&] { multiplied = 0, multiply_units<T>(&rate, 0, 1, worker); });
  std::printf("attention of %lld queries over %lld rows, %lld heads of %lld: %.2f ms, %.0f GFLOP/s (units reach %.0f)\n",
              (long long)setup.queries, (long long)setup.rows, (long long)setup.heads, (long long)setup.size,
              seconds * 1e3, operations / seconds * 1e-9, double(multiplied) / peak * 1e-9);
}

template <class T>
void time_elements(const Setup& setup, Worker& worker) {
  const int64_t rows = 256, width = setup.heads * setup.size;
  Arena memory;
  const float* x = numbers<float>(memory, rows * width);
  const T* activations = numbers<T>(memory, rows * width);
  T* out = numbers<T>(memory, rows * width);
  const LayerNormTask norm{rows, width, x, x, x, 1e-6f, out};
  const double scale = 1e9 / double(rows * width);
  std::printf("layer_norm %.3f ns an element", scale * best_of(50, [&] { layer_norm_units<T>(&norm, 0, rows, worker); }));
  const char* const names[] = {"silu", "gelu_tanh", "gelu", "quick_gelu"};
  for (int kind = 0; kind < kNumEncoderActivations; kind++) {
    const ActivateTask task{rows, width, activations, EncoderActivation(kind), out};
    std::printf(", %s %.3f", names[kind], scale * best_of(50, [&] { activate_units<T>(&task, 0, rows, worker); }));
  }
  std::printf("\n");
}

}  // namespace
}  // namespace cadenza::CADENZA_ISA

int main(int argc, char** argv) {
  using namespace cadenza::CADENZA_ISA;
  Setup setup;
  bool is_f32 = false;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--f32") == 0) is_f32 = true;
    if (i + 1 == argc) break;
    if (std::strcmp(argv[i], "--rows") == 0) setup.rows = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--heads") == 0) setup.heads = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--size") == 0) setup.size = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--queries") == 0) setup.queries = std::atoll(argv[i + 1]);
  }
  cadenza::Arena arena;
  cadenza::Worker worker{0, arena};
  cadenza::enter_float_state();
  is_f32 ? time_attention<float>(setup, worker) : time_attention<cadenza::bf16>(setup, worker);
  is_f32 ? time_elements<float>(setup, worker) : time_elements<cadenza::bf16>(setup, worker);
  return 0;
}
