// A tiny decoder's streams have the recorded bits on every table of the portable class, and on those
// that multiply by tiles.
//
// The Python suite has a larger corpus (tests/golden); this one runs where Python cannot, such as
// under an emulator. Everything here is made of integers and of exactly rounded operations. A
// changed digest needs another ARITHMETIC_REVISION (src/cadenza/fingerprint.py).
#include "core/kv_codes.h"
#include "core/quantised.h"
#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {
namespace {

constexpr int64_t kHidden = 48, kInner = 56, kTokens = 211, kHeads = 4, kKvHeads = 2, kHead = 16;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kHead, kAttended = kHeads * kHead;
constexpr int64_t kPrompt = 530, kNew = 4, kPageSize = 16, kPages = 35;  // more than one span

struct Style {
  const char* name;
  Activation activation;
  float soft_cap;
  int64_t window;
  int code_format;  // of the weights; -1: those of the activations
  KvFormat kv_format;
  uint64_t recorded[2];  // by DType
  uint64_t by_tiles;     // in bf16, of weights of bf16; else 0
};

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; i++) state_ = (state_ ^ from[i]) * 1099511628211ull;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 14695981039346656037ull;  // FNV-1a
};

// A packed weight [n, k]; gated: n rows of gate, then n of up.
struct GoldenWeight {
  ProductTypes types;
  Aligned packed;

  GoldenWeight(const Context& context, Random& random, DType dtype, int format, int64_t n,
               int64_t k, bool gated = false)
      : types(format < 0 ? format_of(dtype) : WeightFormat::kCodes, dtype),
        packed(bytes(dtype, format, n, k, gated)) {
    const int64_t rows = gated ? 2 * n : n;
    std::vector<float> values = random_values<float>(random, rows * k, 0.25f);
    std::vector<PackSource> sources{{values.data(), DType::kF32, n, k}};
    if (gated) sources.push_back({values.data() + n * k, DType::kF32, n, k});
    if (format < 0) {
      pack(*context.executors[0], {sources, k, packed.data(), dtype, gated});
      return;
    }
    std::vector<CodeSource> codes;
    for (const PackSource& source : sources) {
      codes.push_back({source, format, 0, nullptr, nullptr, nullptr, 0});
    }
    uint8_t* to = static_cast<uint8_t*>(packed.data());
    pack_quantised(*context.executors[0], {codes, k, to, bytes(dtype, format, n, k, gated), gated});
  }

  static int64_t bytes(DType dtype, int format, int64_t n, int64_t k, bool gated) {
    if (format < 0) return packed_bytes(n, k, dtype, gated);
    const int64_t panels = ceil_div(n, gated ? kPanel / 2 : kPanel);
    return int64_t(sizeof(CodesHeader)) + panels * code_panel_bytes(format, k);
  }
};

// Cosines and sines of some angles, by the rational parametrisation of the circle.
std::vector<float> rational_rotations() {
  std::vector<float> table;
  for (int64_t p = 0; p < kPrompt + kNew; p++) {
    double t[kHead / 2];
    for (int64_t i = 0; i < kHead / 2; i++) t[i] = double(p * (i + 1) % 97) / 40.0;
    for (double x : t) table.push_back(float((1 - x * x) / (1 + x * x)));
    for (double x : t) table.push_back(float(2 * x / (1 + x * x)));
  }
  return table;
}

template <class T>
class GoldenDecoder {
 public:
  GoldenDecoder(const Context& context, const Style& style, size_t threads)
      : style_(style),
        runtime_(context.runtime(threads)),
        random_(9),
        embedding_(weight(context, kTokens, kHidden)),
        qkv_(weight(context, kQkv, kHidden)),
        out_(weight(context, kHidden, kAttended)),
        gate_up_(weight(context, kInner, kHidden, true)),
        down_(weight(context, kHidden, kInner)),
        norm_(random_values<float>(random_, kHidden)),
        head_norm_(random_values<float>(random_, kHead)),
        rope_(rational_rotations()),
        keys_(pool_bytes()),
        values_(pool_bytes()) {
    for (int32_t page = 0; page < kPages; page++) pages_.push_back((page * 13 + 5) % kPages);
  }

  // The digest of the choices after the prompt and after each new token.
  uint64_t play() {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < kPrompt; i++) ids.push_back(int32_t((i * i + 3 * i + 7) % kTokens));
    Digest digest;
    int32_t token = 0;
    for (int64_t at = 0; at < kPrompt; at += 53) {
      token = step({ids.begin() + at, ids.begin() + at + 53}, at, digest);
    }
    for (int64_t i = 0; i < kNew; i++) token = step({token}, kPrompt + i, digest);
    return digest.value();
  }

 private:
  GoldenWeight weight(const Context& context, int64_t n, int64_t k, bool gated = false) {
    return {context, random_, dtype_of<T>(), style_.code_format, n, k, gated};
  }
  int64_t pool_bytes() const {
    const bool codes = style_.kv_format == KvFormat::kInt8;
    const int64_t token = codes ? kv_code_bytes(kHead) : kHead * int64_t(sizeof(T));
    return kPages * kPageSize * kKvHeads * token;
  }

  // Computes tokens from a position on, and chooses after the last one, greedily and at random.
  int32_t step(const std::vector<int32_t>& ids, int64_t position, Digest& digest) {
    const int64_t rows = int64_t(ids.size());
    std::vector<float> x(size_t(rows * kHidden));
    EmbedTask table{rows, kHidden, kTokens, ids.data(), embedding_.packed.data(), true, 3.0f,
                    x.data()};
    embed(runtime_, embedding_.types.weight, table);
    add(attend(product(qkv_, normed(x, rows), rows, kQkv), rows, position), out_, kAttended, x);
    std::vector<T> inner(size_t(rows * kInner));
    std::vector<T> input = normed(x, rows);
    gated_linear(runtime_, gate_up_.types,
                 {rows, kInner, kHidden, input.data(), gate_up_.packed.data(), nullptr,
                  style_.activation, inner.data()});
    add(inner, down_, kInner, x);
    std::vector<T> last = normed({x.end() - kHidden, x.end()}, 1);
    return choose(last, position + rows, digest);
  }

  std::vector<T> normed(const std::vector<float>& x, int64_t rows) {
    std::vector<T> out(x.size());
    rms_norm(runtime_, dtype_of<T>(),
             {rows, kHidden, x.data(), norm_.data(), 1e-5f, nullptr, out.data(), false});
    return out;
  }
  std::vector<T> product(GoldenWeight& w, const std::vector<T>& x, int64_t rows, int64_t n) {
    std::vector<T> out(size_t(rows * n));
    linear(runtime_, w.types,
           {rows, n, kHidden, x.data(), w.packed.data(), nullptr, nullptr, out.data(), false});
    return out;
  }
  void add(const std::vector<T>& y, GoldenWeight& w, int64_t k, std::vector<float>& x) {
    linear(runtime_, w.types,
           {int64_t(y.size()) / k, kHidden, k, y.data(), w.packed.data(), nullptr, x.data(),
            x.data(), true, 0.75f});
  }
  std::vector<T> attend(const std::vector<T>& qkv, int64_t rows, int64_t position) {
    std::vector<T> out(size_t(rows * kAttended));
    std::vector<int32_t> positions, slots;
    for (int64_t p = position; p < position + rows; p++) {
      positions.push_back(int32_t(p));
      slots.push_back(pages_[size_t(p / kPageSize)] * int32_t(kPageSize) + int32_t(p % kPageSize));
    }
    const int32_t starts[] = {0, int32_t(rows)}, lens[] = {int32_t(position + rows)};
    AttendTask task{};
    task.rows = 1, task.num_tokens = rows, task.pages_per_row = kPages;
    task.page_size = kPageSize, task.num_pages = kPages;
    task.heads = kHeads, task.kv_heads = kKvHeads, task.head_size = task.value_size = kHead;
    task.rotary_size = kHead, task.rope_rows = kPrompt + kNew;
    task.scale = 0.25f, task.soft_cap = style_.soft_cap, task.window = style_.window;
    task.qkv = qkv.data(), task.positions = task.rope_positions = positions.data(), task.slot_mapping = slots.data();
    task.query_starts = starts, task.kv_lens = lens, task.page_table = pages_.data();
    task.rope = rope_.data(), task.q_weight = task.k_weight = head_norm_.data();
    task.norm_eps = 1e-6f, task.kv_format = style_.kv_format;
    task.k_pool = keys_.data(), task.v_pool = values_.data(), task.out = out.data();
    rope_append_attend(runtime_, dtype_of<T>(), task);
    return out;
  }
  int32_t choose(const std::vector<T>& x, int64_t position, Digest& digest) {
    const uint32_t key = uint32_t(position) * 2654435761u;
    const SampleParams rows[] = {{0, 0, 1, 0, {0, 0}, 5},
                                 {0.875f, 40, 0.9375f, 0.03125f, {key, ~key}, 5},
                                 {1.25f, 0, 1, 0, {~key, key}, 0, -1, 1.5f}};
    std::vector<T> input;
    for (int i = 0; i < 3; i++) input.insert(input.end(), x.begin(), x.end());
    std::vector<int32_t> out(3 * kSampleColumns);
    next_token(runtime_, embedding_.types,
               {{3, kTokens, kHidden, input.data(), embedding_.packed.data(), nullptr, nullptr,
                 nullptr, false},
                rows,
                out.data(),
                {1.5f, style_.soft_cap}});
    digest.add(out.data(), out.size() * sizeof(int32_t));
    return out[kSampleColumns + kColumnToken];
  }

  const Style& style_;
  Runtime runtime_;
  Random random_;
  GoldenWeight embedding_, qkv_, out_, gate_up_, down_;
  std::vector<float> norm_, head_norm_, rope_;
  Aligned keys_, values_;
  std::vector<int32_t> pages_;
};

constexpr Style kStyles[] = {
    {"silu", Activation::kSilu, 0, 0, -1, KvFormat::kActivations,
     {0xe24479c5158b733e, 0xc8d339041e08acc4}, 0x74889bcc39dadbc0},
    {"gelu, window", Activation::kGelu, 0, 45, -1, KvFormat::kActivations,
     {0x4099a25351a23edf, 0xee4799645d1079ce}, 0xe2f5e128cdee9398},
    {"gelu_tanh, soft cap", Activation::kGeluTanh, 8, 0, -1, KvFormat::kActivations,
     {0x8cd7ed99ae9637fd, 0x95d47a6d6b847a01}, 0x2e11dc043c7d44c0},
    {"int8 KV", Activation::kSilu, 0, 0, -1, KvFormat::kInt8,
     {0xe426fc6390221770, 0x06c477b8f228f432}, 0x8d30b9665f8c451e},
    {"int8", Activation::kSilu, 0, 0, kInt8Format, KvFormat::kActivations,
     {0xd8ff9569b379da32, 0x9d6335ec7f6968a9}, 0},
    {"int4, int8 KV", Activation::kSilu, 0, 0, kInt4Format, KvFormat::kInt8,
     {0x2f5b8f30583d61bc, 0x0e8fc3c528a6153b}, 0},
};

// The class of tiles has its own products of weights of bf16; what else it computes is portable.
uint64_t recorded_bits(const Context& context, const Style& style, DType dtype) {
  const bool by_tiles = dtype == DType::kBf16 && style.code_format < 0;
  if (by_tiles && has_tiles(context.kernels.isa)) return style.by_tiles;
  return style.recorded[int(dtype)];
}

// A line for each number of threads with other bits.
template <class T>
std::string differences(const Context& context, const Style& style) {
  std::string lines;
  for (size_t threads = 0; threads < context.executors.size(); threads++) {
    const uint64_t found = GoldenDecoder<T>(context, style, threads).play();
    if (found == recorded_bits(context, style, dtype_of<T>())) continue;
    char text[128];
    std::snprintf(text, sizeof(text), "\n%s in %s: 0x%016llx with %zu threads", style.name,
                  dtype_of<T>() == DType::kF32 ? "f32" : "bf16", (unsigned long long)found,
                  threads + 1);
    lines += text;
  }
  return lines;
}

TEST(a_decoder_has_the_recorded_bits) {
  std::string lines;
  for (const Style& style : kStyles) {
    lines += differences<float>(context, style);
    const bool is_exact = style.code_format >= 0 && style.kv_format == KvFormat::kInt8;
    const bool is_recorded =
        !has_bf16_instructions(context.kernels.isa) || has_tiles(context.kernels.isa);
    if (is_exact || is_recorded) lines += differences<bf16>(context, style);
  }
  if (!lines.empty()) fail(__FILE__, __LINE__, lines);
}

}  // namespace
}  // namespace cadenza::tests
