// Times each operation of a step separately, with the shapes and the number of layers of a model,
// then all of them in the order of a step. Sums each layer's best time over the repeats,
// which reduces noise from other load. The step's bound is the larger of reading its weights and KV
// and of multiplying; both rates are measured between its runs.
//
//   build/native/bench [--shape smollm2-135m|llama-3.2-1b|qwen3-4b|llama-3.1-8b] [--layers N]
//   [--weights bf16|q8_0|int4|q4_k|q6_k] [--threads N] [--rows 1,4,8] [--context 128] [--prefill 512]
//   [--behind 0] [--repeats 10] [--steps 4] [--cpu-time] [--kv-int8]
//
// --layers computes so many layers of a shape, for those whose weights do not fit the memory.
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

#include "core/code_format.h"
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
                             {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256},
                             {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936},
                             {"llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256}};

struct WeightType {
  const char* name;
  int format;  // of codes, or -1: bf16

  ProductTypes types() const {
    return {format < 0 ? WeightFormat::kBf16 : WeightFormat::kCodes, DType::kBf16};
  }
  int64_t panel_bytes(int64_t k) const {
    return format < 0 ? cadenza::panel_bytes(WeightFormat::kBf16, k) : code_panel_bytes(format, k);
  }
};

constexpr WeightType kWeightTypes[] = {
    {"bf16", -1},
    {"q8_0", kInt8Format},
    {"int4", kInt4Format},
    {"q4_k", index_of(CodeFormat{4, 32, ScaleType::kNested, Correction::kOffset})},
    {"q6_k", index_of(CodeFormat{8, 16, ScaleType::kNested, Correction::kNone})}};

// The weights [N, K] of one operation in all layers, one behind the other.
struct Weights {
  char* data;
  int64_t n, k, layer_bytes;

  const char* of(int64_t layer) const { return data + layer * layer_bytes; }
};

struct Options {
  Shape shape = kShapes[0];
  WeightType weights = kWeightTypes[0];
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

Weights make_weights(const WeightType& type, int64_t layers, int64_t n, int64_t k) {
  if (type.format < 0) {
    return {reinterpret_cast<char*>(weights(n, k * layers)), n, k, 2 * n * k};
  }
  CodesHeader header{CodesHeader::kVersion, 1, 0, k, {{type.format, int32_t(n / kPanel)}}};
  const int64_t bytes = header.num_bytes();
  Weights made{filled<char>(layers * bytes, 0x11), n, k, bytes};  // scales of 0.0006
  for (int64_t l = 0; l < layers; l++) {
    std::memcpy(made.data + l * bytes, &header, sizeof(header));
  }
  return made;
}

struct Step {
  const Options& options;
  Runtime runtime;
  int64_t tokens, rows, context;
  Weights qkv_w, o_w, gate_up_w, down_w, head_w;
  bf16 *act, *wide, *k_pool, *v_pool;
  float *x, *norm;
  std::vector<int32_t> positions, slots, starts, lens, table;
  std::vector<int32_t> out;
  std::vector<SampleParams> params;
  float* rope;
  const Shape& shape = options.shape;

  void linear_layer(int64_t l, const Weights& w, bool adds) {
    LinearTask task{tokens,
                    w.n,
                    w.k,
                    wide,
                    w.of(l),
                    nullptr,
                    adds ? x : nullptr,
                    adds ? static_cast<void*>(x) : act,
                    adds};
    linear(runtime, options.weights.types(), task);
  }
  void gated_layer(int64_t l) {
    GatedTask task{tokens,  shape.ffn,         shape.hidden, wide, gate_up_w.of(l),
                   nullptr, Activation::kSilu, act};
    gated_linear(runtime, options.weights.types(), task);
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
    task.positions = task.rope_positions = positions.data();
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
      linear_layer(l, qkv_w, false);
      attend_layer(l);
      linear_layer(l, o_w, true);
      gated_layer(l);
      linear_layer(l, down_w, true);
      norm_layer(l);
    }
    head();
  }
  int64_t kv_bytes() const {
    int64_t token = options.kv_int8 ? kv_code_bytes(shape.size) : 2 * shape.size;
    return rows * context * 2 * shape.kv_heads * token;
  }
  int64_t bytes() const {
    int64_t layer = qkv_w.layer_bytes + o_w.layer_bytes + gate_up_w.layer_bytes + down_w.layer_bytes;
    return shape.layers * (layer + kv_bytes()) + head_w.layer_bytes;
  }
  double operations() const {
    int64_t layer = shape.qkv_width() + shape.heads * shape.size + 3 * shape.ffn;
    int64_t seen = context - (tokens / rows - 1) / 2;
    return 2.0 * double(shape.layers * tokens *
                            (layer * shape.hidden + 2 * seen * shape.heads * shape.size) +
                        rows * shape.vocab * shape.hidden);
  }
  void head() {
    NextTokenTask task{
        {rows, shape.vocab, shape.hidden, wide, head_w.data, nullptr, nullptr, nullptr, false},
        params.data(),
        out.data(),
        {}};
    next_token(runtime, options.weights.types(), task);
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
  const auto make = [&](Weights Step::*weight, int64_t layers, int64_t n, int64_t k) {
    s.*weight = shared ? shared->*weight : make_weights(options.weights, layers, n, k);
  };
  make(&Step::qkv_w, shape.layers, shape.qkv_width(), shape.hidden);
  make(&Step::o_w, shape.layers, shape.hidden, shape.heads * shape.size);
  make(&Step::gate_up_w, shape.layers, 2 * shape.ffn, shape.hidden);
  make(&Step::down_w, shape.layers, shape.hidden, shape.ffn);
  make(&Step::head_w, 1, shape.vocab, shape.hidden);
  s.rope = shared ? shared->rope : filled<float>(kMaxContext * shape.size, 0.7f);
  s.norm = shared ? shared->norm : filled<float>(shape.hidden, 1.0f);
  int64_t pages = ceil_div(context, kPage);
  s.act = filled<bf16>(s.tokens * std::max(2 * shape.ffn, shape.qkv_width()), bf16{0x3c00});
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

// Multiplications and sums a second, of the weights' type.
double measure_peak(const Step& s) {
  if (s.options.weights.format >= 0) return measure_multiply_codes(s.runtime, 1);
  return measure_multiply(s.runtime, DType::kBf16, 1);
}

// Runs whole steps, each between measurements of the two rates.
void report_step(Step& s, const void* memory) {
  std::vector<double> ms, shares;
  for (int i = 0; i < s.options.repeats; i++) {
    double read = measure_read(s.runtime, memory, kReadBytes, 1);
    double multiply = measure_peak(s);
    double start = now(s.options.cpu_time);
    for (int j = 0; j < s.options.steps; j++) s.run();
    double took = (now(s.options.cpu_time) - start) / s.options.steps;
    read = (read + measure_read(s.runtime, memory, kReadBytes, 1)) / 2;
    multiply = (multiply + measure_peak(s)) / 2;
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

// An operation of all layers: the time, and the share of what reading its bytes and multiplying take.
struct Timed {
  double ms, bytes, operations;

  double share(double read, double multiply) const {
    return 1e5 * std::max(bytes / read, operations / multiply) / ms;
  }
};

void report(Step& s, const void* memory) {
  const Shape& shape = s.shape;
  const double read = measure_read(s.runtime, memory, kReadBytes, 5);
  const double multiply = measure_peak(s);
  const auto timed = [&](const Weights& w, int64_t layers, int64_t rows,
                         const std::function<void(int64_t)>& body) {
    return Timed{best(s.options, layers, body), double(layers * w.layer_bytes),
                 2.0 * double(layers * w.n * w.k * rows)};
  };
  const auto linear_time = [&](const Weights& w, bool adds) {
    return timed(w, shape.layers, s.tokens, [&, adds](int64_t l) { s.linear_layer(l, w, adds); });
  };
  const Timed all[] = {linear_time(s.qkv_w, false), linear_time(s.o_w, true),
                       timed(s.gate_up_w, shape.layers, s.tokens, [&](int64_t l) { s.gated_layer(l); }),
                       linear_time(s.down_w, true),
                       timed(s.head_w, 1, s.rows, [&](int64_t) { s.head(); })};
  const int64_t seen = s.context - (s.tokens / s.rows - 1) / 2;
  const Timed attend{best(s.options, shape.layers, [&](int64_t l) { s.attend_layer(l); }),
                     double(shape.layers * s.kv_bytes()),
                     4.0 * double(shape.layers * s.tokens * seen * shape.heads * shape.size)};
  const double norm = best(s.options, shape.layers, [&](int64_t l) { s.norm_layer(l); });
  std::printf("%4ld tokens, %.1f GB/s, %.0f GF:", long(s.tokens), 1e-9 * read, 1e-9 * multiply);
  const char* const names[] = {"qkv", "o", "gate-up", "down", "head"};
  double total = norm + attend.ms;
  for (size_t i = 0; i < std::size(all); i++) {
    std::printf(" %s %.2f (%.0f %%)", names[i], all[i].ms, all[i].share(read, multiply));
    total += all[i].ms;
  }
  std::printf(" attend %.2f (%.0f %%) norm %.2f  total %.2f ms = %.1f tok/s\n", attend.ms,
              attend.share(read, multiply), norm, total, double(s.tokens) / total * 1e3);
  std::fflush(stdout);
}

template <class T, size_t N>
const T& named(const T (&all)[N], const char* name) {
  for (const T& each : all) {
    if (std::strcmp(each.name, name) == 0) return each;
  }
  std::fprintf(stderr, "there is no '%s'\n", name);
  std::exit(1);
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
    if (name == "--shape") options.shape = named(kShapes, value);
    if (name == "--weights") options.weights = named(kWeightTypes, value);
    if (name == "--layers") options.shape.layers = std::atoi(value);
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
    report(s, memory);
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
