// Times each operation of a step separately, with the shapes and the number of layers of a model,
// then all of them in the order of a step. Sums each layer's best time over the repeats,
// which reduces noise from other load. The step's bound is the larger of reading its weights and KV
// and of multiplying; both rates are measured between its runs.
//
//   build/native/bench [--shape smollm2-135m|llama-3.2-1b] [--threads N] [--rows 1,4,8]
//   [--context 128] [--prefill 512] [--behind 0] [--repeats 10] [--steps 4] [--cpu-time] [--kv-int8]
//
// --prefill N tokens of a prompt are computed behind --behind of it; the rows behind --context.
// build/native/order-ISA has the same options. It times steps whose products of bf16 are in the order
// of AMX's tiles beside steps as they are, in turns.
//
// --cpu-time measures the calling thread's CPU time instead of wall time; use it with one thread
// only, as the time of worker threads is not included. --kv-int8 stores keys and values as codes.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/kv_codes.h"
#include "core/ops.h"
#include "core/roofline.h"

using namespace cadenza;

namespace cadenza {
// Linked into the binary that compares two orders of products (bench/order.cpp).
[[gnu::weak]] void use_tile_order(KernelTable& table);
}  // namespace cadenza

namespace {

constexpr int64_t kPage = 16, kMaxContext = 8192;
constexpr int kPeakRepeats = 10;
constexpr int64_t kReadBytes = 256 << 20;

struct Shape {
  const char* name;
  int64_t layers, hidden, heads, kv_heads, size, ffn, vocab;

  int64_t qkv_width() const { return (heads + 2 * kv_heads) * size; }
};

constexpr Shape kShapes[] = {{"smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152},
                             {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256}};

struct Options {
  Shape shape = kShapes[0];
  int threads = 1;
  int64_t context = 128, prefill = 512, behind = 0;
  std::vector<int64_t> rows{1, 4, 8, 16, 32, 64};
  bool cpu_time = false, kv_int8 = false;
  int repeats = 10, steps = 4;
};

double now(bool cpu_time) {
  timespec t;
  clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

template <class T>
T* filled(int64_t count, T value) {
  T* data =
      static_cast<T*>(std::aligned_alloc(64, size_t(round_up(count * int64_t(sizeof(T)), 64))));
  for (int64_t i = 0; i < count; i++) data[i] = value;
  return data;
}

bf16* weights(int64_t n, int64_t k) {
  bf16* w = filled<bf16>(n * k, bf16{0});
  for (int64_t i = 0; i < n * k; i++) w[i].bits = uint16_t(0x3c00 + (i * 7919 & 0x807f));
  return w;
}

struct Step {
  const Options& options;
  Runtime runtime;
  int64_t tokens, rows, context;
  bf16 *qkv_w, *o_w, *gate_up_w, *down_w, *head_w;
  bf16 *act, *wide, *k_pool, *v_pool;
  float *x, *norm;
  std::vector<int32_t> positions, slots, starts, lens, table;
  std::vector<int32_t> out;
  std::vector<SampleParams> params;
  float* rope;
  const Shape& shape = options.shape;

  void linear_layer(int64_t l, const bf16* w, int64_t n, int64_t k, bool adds) {
    LinearTask task{tokens,
                    n,
                    k,
                    wide,
                    w + l * n * k,
                    nullptr,
                    adds ? x : nullptr,
                    adds ? static_cast<void*>(x) : act,
                    adds};
    linear(runtime, DType::kBf16, task);
  }
  void gated_layer(int64_t l) {
    GatedTask task{tokens,
                   shape.ffn,
                   shape.hidden,
                   wide,
                   gate_up_w + l * 2 * shape.ffn * shape.hidden,
                   nullptr,
                   Activation::kSilu,
                   act};
    gated_linear(runtime, DType::kBf16, task);
  }
  void norm_layer(int64_t) {
    for (int i = 0; i < 2; i++) {
      rms_norm(runtime, DType::kBf16, {tokens, shape.hidden, x, norm, 1e-5f, nullptr, act, false});
    }
  }
  void attend_layer(int64_t l) {
    AttendTask task{};
    task.rows = rows;
    task.num_tokens = tokens;
    task.pages_per_row = int64_t(table.size()) / rows;
    task.page_size = kPage;
    task.num_pages = int64_t(table.size());
    task.num_layers = shape.layers;
    task.layer = l;
    task.heads = shape.heads;
    task.kv_heads = shape.kv_heads;
    task.head_size = task.value_size = task.rotary_size = shape.size;
    task.rope_rows = kMaxContext;
    task.scale = 0.125f;
    task.qkv = wide;
    task.positions = positions.data();
    task.slot_mapping = slots.data();
    task.query_starts = starts.data();
    task.kv_lens = lens.data();
    task.page_table = table.data();
    task.rope = rope;
    if (options.kv_int8) task.kv_format = KvFormat::kInt8;
    task.k_pool = k_pool;
    task.v_pool = v_pool;
    task.out = act;
    rope_append_attend(runtime, DType::kBf16, task);
  }
  void run() {
    for (int64_t l = 0; l < shape.layers; l++) {
      linear_layer(l, qkv_w, shape.qkv_width(), shape.hidden, false);
      attend_layer(l);
      linear_layer(l, o_w, shape.hidden, shape.hidden, true);
      gated_layer(l);
      linear_layer(l, down_w, shape.hidden, shape.ffn, true);
      norm_layer(l);
    }
    head();
  }
  int64_t bytes() const {
    int64_t layer = shape.qkv_width() + shape.hidden + 3 * shape.ffn;
    int64_t token = options.kv_int8 ? kv_code_bytes(shape.size) : 2 * shape.size;
    int64_t kv = rows * context * 2 * shape.kv_heads * token;
    return shape.layers * (2 * layer * shape.hidden + kv) + 2 * shape.vocab * shape.hidden;
  }
  double operations() const {
    int64_t layer = shape.qkv_width() + shape.hidden + 3 * shape.ffn;
    int64_t seen = context - (tokens / rows - 1) / 2;
    return 2.0 * double(shape.layers * tokens *
                            (layer * shape.hidden + 2 * seen * shape.heads * shape.size) +
                        rows * shape.vocab * shape.hidden);
  }
  void head() {
    NextTokenTask task{
        {rows, shape.vocab, shape.hidden, wide, head_w, nullptr, nullptr, nullptr, false},
        params.data(),
        out.data(),
        {}};
    next_token(runtime, DType::kBf16, task);
  }
};

struct StepSize {
  int64_t rows, queries, context;  // queries: tokens of each row
};

Step make_step(const Options& options, Runtime runtime, const StepSize& size, const Step* shared) {
  const auto [rows, queries, context] = size;
  Step s{options, runtime, rows * queries,
         rows,    context, {},
         {},      {},      {},
         {},      {},      {},
         {},      {},      {},
         {},      {},      {},
         {},      {},      {},
         {},      {},      {}};
  const Shape& shape = options.shape;
  s.qkv_w = shared ? shared->qkv_w : weights(shape.qkv_width(), shape.hidden * shape.layers);
  s.o_w = shared ? shared->o_w : weights(shape.hidden, shape.hidden * shape.layers);
  s.gate_up_w = shared ? shared->gate_up_w : weights(2 * shape.ffn, shape.hidden * shape.layers);
  s.down_w = shared ? shared->down_w : weights(shape.hidden, shape.ffn * shape.layers);
  s.head_w = shared ? shared->head_w : weights(shape.vocab, shape.hidden);
  s.rope = shared ? shared->rope : filled<float>(kMaxContext * shape.size, 0.7f);
  s.norm = shared ? shared->norm : filled<float>(shape.hidden, 1.0f);
  int64_t pages = ceil_div(context, kPage);
  s.act = filled<bf16>(s.tokens * 2 * shape.ffn, bf16{0x3c00});
  s.wide = weights(s.tokens, shape.ffn);
  s.x = filled<float>(s.tokens * shape.hidden, 0.01f);
  s.k_pool =
      filled<bf16>(shape.layers * rows * pages * kPage * shape.kv_heads * shape.size, bf16{0x3c00});
  s.v_pool =
      filled<bf16>(shape.layers * rows * pages * kPage * shape.kv_heads * shape.size, bf16{0x3c00});
  for (int64_t i = 0; i < rows * pages; i++) s.table.push_back(int32_t(i * 7 % (rows * pages)));
  for (int64_t r = 0; r <= rows; r++) s.starts.push_back(int32_t(r * queries));
  for (int64_t r = 0; r < rows; r++) {
    s.lens.push_back(int32_t(context));
    for (int64_t q = 0; q < queries; q++) {
      int64_t position = context - queries + q;
      s.positions.push_back(int32_t(position));
      s.slots.push_back(
          int32_t(s.table[size_t(r * pages + position / kPage)] * kPage + position % kPage));
    }
  }
  s.params.assign(size_t(rows), SampleParams{0, 0, 1, 0, {1, 2}, -1});
  s.out.assign(size_t(rows * kSampleColumns), 0);
  return s;
}

// Sum over all layers of the best time of the repeats, in milliseconds.
double best(const Options& options, int64_t layers, const std::function<void(int64_t)>& body) {
  std::vector<double> seconds(size_t(layers), 1e9);
  for (int i = 0; i < options.repeats; i++) {
    for (int64_t l = 0; l < layers; l++) {
      double start = now(options.cpu_time);
      body(l);
      double took = now(options.cpu_time) - start;
      if (took < seconds[size_t(l)]) seconds[size_t(l)] = took;
    }
  }
  double total = 0;
  for (double each : seconds) total += each;
  return total * 1e3;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs whole steps, each between measurements of the two rates.
void report_step(Step& s, const void* memory) {
  std::vector<double> ms, shares;
  for (int i = 0; i < s.options.repeats; i++) {
    double read = measure_read(s.runtime, memory, kReadBytes, 1);
    double multiply = measure_multiply(s.runtime, DType::kBf16, 1);
    double start = now(s.options.cpu_time);
    for (int j = 0; j < s.options.steps; j++) s.run();
    double took = (now(s.options.cpu_time) - start) / s.options.steps;
    read = (read + measure_read(s.runtime, memory, kReadBytes, 1)) / 2;
    multiply = (multiply + measure_multiply(s.runtime, DType::kBf16, 1)) / 2;
    ms.push_back(took * 1e3);
    shares.push_back(std::max(double(s.bytes()) / read, s.operations() / multiply) / took);
  }
  std::printf("             step: median %.2f ms, best %.2f ms; %.0f %% of its bound\n", median(ms),
              *std::min_element(ms.begin(), ms.end()), 100 * median(shares));
  std::fflush(stdout);
}

double run_steps(Step& s) {
  double start = now(s.options.cpu_time);
  for (int j = 0; j < s.options.steps; j++) s.run();
  return (now(s.options.cpu_time) - start) / s.options.steps * 1e3;
}

// Runs both kinds of step in turns: ascending, tiles, tiles, ascending.
void compare_orders(Step& ascending, Step& tiles) {
  std::vector<double> first, second, ratios;
  for (int i = 0; i < ascending.options.repeats; i++) {
    double a = run_steps(ascending), t = run_steps(tiles);
    t = std::min(t, run_steps(tiles));
    a = std::min(a, run_steps(ascending));
    first.push_back(a);
    second.push_back(t);
    ratios.push_back(t / a);
  }
  std::printf("%4ld tokens: ascending median %.2f ms, best %.2f; order of tiles %.2f, best %.2f; "
              "median of the ratios %.3f\n",
              long(ascending.tokens), median(first), *std::min_element(first.begin(), first.end()),
              median(second), *std::min_element(second.begin(), second.end()), median(ratios));
  std::fflush(stdout);
}

void report(Step& s) {
  const Shape& shape = s.shape;
  const int64_t width = shape.qkv_width();
  double qkv = best(s.options, shape.layers,
                    [&](int64_t l) { s.linear_layer(l, s.qkv_w, width, shape.hidden, false); });
  double o = best(s.options, shape.layers,
                  [&](int64_t l) { s.linear_layer(l, s.o_w, shape.hidden, shape.hidden, true); });
  double gate_up = best(s.options, shape.layers, [&](int64_t l) { s.gated_layer(l); });
  double down = best(s.options, shape.layers, [&](int64_t l) {
    s.linear_layer(l, s.down_w, shape.hidden, shape.ffn, true);
  });
  double norm = best(s.options, shape.layers, [&](int64_t l) { s.norm_layer(l); });
  double attend = best(s.options, shape.layers, [&](int64_t l) { s.attend_layer(l); });
  double head = best(s.options, 1, [&](int64_t) { s.head(); });
  double total = qkv + o + gate_up + down + norm + attend + head;
  auto rate = [&](double n, double k, double layers, double ms, double tokens) {
    return 2e-6 * n * k * layers * tokens / ms;
  };
  std::printf(
      "%4ld tokens: qkv %6.2f (%3.0f GF) o %6.2f (%3.0f) gate-up %6.2f (%3.0f) down %6.2f (%3.0f) "
      "norm %5.2f attend %6.2f head %6.2f (%3.0f)  total %7.2f ms = %6.0f tok/s\n",
      long(s.tokens), qkv, rate(width, shape.hidden, shape.layers, qkv, double(s.tokens)), o,
      rate(shape.hidden, shape.hidden, shape.layers, o, double(s.tokens)), gate_up,
      rate(2 * shape.ffn, shape.hidden, shape.layers, gate_up, double(s.tokens)), down,
      rate(shape.hidden, shape.ffn, shape.layers, down, double(s.tokens)), norm, attend, head,
      rate(shape.vocab, shape.hidden, 1, head, double(s.rows)), total,
      double(s.tokens) / total * 1e3);
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i++) {
    std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--cpu-time") {
      options.cpu_time = true;
      continue;
    }
    if (name == "--kv-int8") {
      options.kv_int8 = true;
      continue;
    }
    if (name == "--shape") {
      const auto* found =
          std::find_if(std::begin(kShapes), std::end(kShapes),
                       [&](const Shape& shape) { return value == std::string(shape.name); });
      if (found == std::end(kShapes)) {
        std::fprintf(stderr, "no shape '%s'\n", value);
        std::exit(1);
      }
      options.shape = *found;
    }
    if (name == "--threads") options.threads = std::atoi(value);
    if (name == "--steps") options.steps = std::atoi(value);
    if (name == "--repeats") options.repeats = std::atoi(value);
    if (name == "--context") options.context = std::atoi(value);
    if (name == "--prefill") options.prefill = std::atoi(value);
    if (name == "--behind") options.behind = std::atoi(value);
    if (name == "--rows") {
      options.rows.clear();
      for (const char* at = value; *at != '\0';) {
        char* end;
        options.rows.push_back(std::strtol(at, &end, 10));
        at = *end == ',' ? end + 1 : end;
      }
    }
    i++;
  }
  return options;
}

void time_steps(const Options& options, Runtime runtime, const StepSize& size, const Step& first,
                const void* memory) {
  Step s = make_step(options, runtime, size, &first);
  if (use_tile_order == nullptr) {
    report(s);
    return report_step(s, memory);
  }
  KernelTable table = runtime.kernels;
  use_tile_order(table);
  Step tiles = make_step(options, {table, runtime.integer, runtime.executor}, size, &first);
  compare_orders(s, tiles);
}

}  // namespace

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  if (std::max(options.context, options.behind + options.prefill) > kMaxContext) {
    std::fprintf(stderr, "contexts may have at most %ld tokens\n", long(kMaxContext));
    return 1;
  }
  Executor executor(options.threads);
  Runtime runtime{kernels(), integer_kernels(), executor};
  std::printf("isa %s, %d threads, peak %.0f GF\n", runtime.kernels.isa, options.threads,
              1e-9 * measure_multiply(runtime, DType::kBf16, kPeakRepeats));
  Step first = make_step(options, runtime, {1, 1, options.context}, nullptr);
  const void* memory = filled<char>(kReadBytes, 1);
  for (int64_t rows : options.rows) {
    time_steps(options, runtime, {rows, 1, options.context}, first, memory);
  }
  if (options.prefill > 0) {
    time_steps(options, runtime, {1, options.prefill, options.behind + options.prefill}, first,
               memory);
  }
  return 0;
}
