// The gated delta net: its definition in double precision, and that no cut, row or slot changes a bit.
#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {
namespace {

struct DeltaShape {
  int64_t key_heads, value_heads, key_size, value_size, taps;
  bool tiled = false;
  int64_t key_width() const { return key_heads * key_size; }
  int64_t value_width() const { return value_heads * value_size; }
  int64_t channels() const { return 2 * key_width() + value_width(); }
  int64_t state_size() const { return value_heads * key_size * value_size; }
};

constexpr DeltaShape kShapes[] = {{1, 1, 16, 16, 2}, {2, 6, 32, 48, 4}, {2, 2, 128, 128, 4},
                                    {2, 6, 16, 32, 3, true}};
constexpr float kEps = 1e-6f;
constexpr int64_t kLayers = 2, kLayer = 1;

struct DeltaWeights {
  std::vector<float> conv, decay, decay_bias, norm;

  explicit DeltaWeights(const DeltaShape& shape) {
    Random random(3);
    conv = random_values<float>(random, shape.taps * shape.channels(), 0.5f);
    norm = random_values<float>(random, shape.value_size);
    decay_bias = random_values<float>(random, shape.value_heads);
    for (int64_t head = 0; head < shape.value_heads; head++) {
      decay.push_back(-std::exp(random.normal() - 2));
    }
  }
};

// The inputs of a sequence.
template <class T>
struct Stream {
  std::vector<T> x, gate;
  std::vector<float> rates;

  Stream(const DeltaShape& shape, int64_t tokens, uint64_t seed) {
    Random random(seed);
    x = random_values<T>(random, tokens * shape.channels());
    gate = random_values<T>(random, tokens * shape.value_width());
    rates = random_values<float>(random, tokens * 2 * shape.value_heads, 2);
  }
};

template <class T>
struct Pools {
  int64_t slots, conv_size, state_size;
  std::vector<T> conv;
  std::vector<float> state;

  // Slots that are not written hold NaN.
  Pools(const DeltaShape& shape, int64_t slots_)
      : slots(slots_), conv_size((shape.taps - 1) * shape.channels()),
        state_size(shape.state_size()), conv(size_t(slots * kLayers * conv_size)),
        state(size_t(slots * kLayers * state_size), kNaN) {
    for (T& each : conv) set(each, kNaN);
  }
  std::vector<uint8_t> bytes(int64_t slot) const {
    const int64_t at = slot * kLayers + kLayer;
    std::vector<uint8_t> all(size_t(conv_size) * sizeof(T) + size_t(state_size) * 4);
    std::memcpy(all.data(), conv.data() + at * conv_size, size_t(conv_size) * sizeof(T));
    std::memcpy(all.data() + size_t(conv_size) * sizeof(T), state.data() + at * state_size,
                size_t(state_size) * 4);
    return all;
  }
};

// Tokens [begin, end) of a stream as a row of a step.
struct Part {
  int stream;
  int64_t begin, end;
  int32_t initial, kept;
  // Slots of further tokens: (token, slot).
  std::vector<std::pair<int64_t, int32_t>> also_kept = {};
};

template <class T>
class Net {
 public:
  Net(const Context& context, const DeltaShape& shape, int64_t slots)
      : context_(context), shape_(shape), weights_(shape), pools(shape, slots) {}

  // The outputs of a step's parts, one after the other.
  std::vector<T> step(const std::vector<Stream<T>>& streams, const std::vector<Part>& parts,
                      size_t threads) {
    std::vector<T> x, gate;
    std::vector<float> rates;
    std::vector<int32_t> starts{0}, initial, kept;
    for (const Part& part : parts) {
      const Stream<T>& stream = streams[size_t(part.stream)];
      append(x, stream.x, part, shape_.channels());
      append(gate, stream.gate, part, shape_.value_width());
      append(rates, stream.rates, part, 2 * shape_.value_heads);
      initial.push_back(part.initial);
      kept.resize(kept.size() + size_t(part.end - part.begin), -1);
      for (auto [token, slot] : part.also_kept) {
        kept[size_t(starts.back() + token - part.begin)] = slot;
      }
      if (part.end > part.begin) kept.back() = part.kept;
      starts.push_back(starts.back() + int32_t(part.end - part.begin));
    }
    std::vector<T> out(gate.size());
    gated_delta(context_.runtime(threads), dtype_of<T>(),
                {{int64_t(parts.size()), starts.data(), initial.data(), kept.data(), pools.slots,
                  kLayers, kLayer},
                 shape_.key_heads, shape_.value_heads, shape_.key_size, shape_.value_size,
                 shape_.taps, shape_.tiled, x.data(), gate.data(), rates.data(), weights_.conv.data(),
                 weights_.decay.data(), weights_.decay_bias.data(), weights_.norm.data(), kEps,
                 pools.conv.data(), pools.state.data(), nullptr, out.data()});
    return out;
  }

 private:
  template <class V>
  static void append(std::vector<V>& to, const std::vector<V>& from, const Part& part,
                     int64_t width) {
    to.insert(to.end(), from.begin() + part.begin * width, from.begin() + part.end * width);
  }

  const Context& context_;
  const DeltaShape shape_;
  const DeltaWeights weights_;

 public:
  Pools<T> pools;
};

double silu(double x) { return x / (1 + std::exp(-x)); }

// The definition: the outputs of all tokens of a stream.
template <class T>
std::vector<double> define(const DeltaShape& shape, const Stream<T>& stream, int64_t tokens) {
  const DeltaWeights weights(shape);
  const int64_t dk = shape.key_size, dv = shape.value_size, channels = shape.channels();
  std::vector<double> mixed(size_t(tokens * channels)), out;
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t c = 0; c < channels; c++) {
      double sum = 0;
      for (int64_t tap = 0; tap < shape.taps; tap++) {
        int64_t from = t - shape.taps + 1 + tap;
        if (from < 0) continue;
        sum += double(widen(stream.x[size_t(from * channels + c)])) *
               weights.conv[size_t(tap * channels + c)];
      }
      mixed[size_t(t * channels + c)] = silu(sum);
    }
  }
  out.resize(size_t(tokens * shape.value_width()));
  for (int64_t head = 0; head < shape.value_heads; head++) {
    std::vector<double> state(size_t(dk * dv), 0);
    const int64_t group = shape.value_heads / shape.key_heads;
    const int64_t key_head = shape.tiled ? head % shape.key_heads : head / group;
    for (int64_t t = 0; t < tokens; t++) {
      const double* q = &mixed[size_t(t * channels + key_head * dk)];
      const double* k = q + shape.key_width();
      const double* v = &mixed[size_t(t * channels + 2 * shape.key_width() + head * dv)];
      double qq = 1e-6, kk = 1e-6, squares = 0;
      for (int64_t i = 0; i < dk; i++) qq += q[i] * q[i], kk += k[i] * k[i];
      const float* rates = &stream.rates[size_t(t * 2 * shape.value_heads + head)];
      double softplus = std::log1p(std::exp(double(rates[0]) + weights.decay_bias[size_t(head)]));
      double decay = std::exp(weights.decay[size_t(head)] * softplus);
      double strength = 1 / (1 + std::exp(-double(rates[shape.value_heads])));
      std::vector<double> y(static_cast<size_t>(dv), 0);
      for (int64_t j = 0; j < dv; j++) {
        double read = 0;
        for (int64_t i = 0; i < dk; i++) {
          state[size_t(i * dv + j)] *= decay;
          read += state[size_t(i * dv + j)] * k[i] / std::sqrt(kk);
        }
        for (int64_t i = 0; i < dk; i++) {
          double& at = state[size_t(i * dv + j)];
          at += k[i] / std::sqrt(kk) * (v[j] - read) * strength;
          y[size_t(j)] += at * q[i] / std::sqrt(qq * double(dk));
        }
        squares += y[size_t(j)] * y[size_t(j)];
      }
      double scale = 1 / std::sqrt(squares / double(dv) + kEps);
      for (int64_t j = 0; j < dv; j++) {
        size_t at = size_t((t * shape.value_heads + head) * dv + j);
        out[at] = y[size_t(j)] * scale * weights.norm[size_t(j)] * silu(widen(stream.gate[at]));
      }
    }
  }
  return out;
}

template <class T>
void check_definition(const Context& context, const DeltaShape& shape) {
  const int64_t tokens = 70;
  std::vector<Stream<T>> streams{{shape, tokens, 7}};
  Net<T> net(context, shape, 1);
  std::vector<T> out = net.step(streams, {{0, 0, tokens, -1, -1}}, 1);
  std::vector<double> expected = define(shape, streams[0], tokens);
  for (size_t i = 0; i < out.size(); i++) {
    CHECK_NEAR(widen(out[i]), expected[i], kEpsilon<T> * std::abs(expected[i]) + 2e-4);
  }
}

TEST(gated_delta_agrees_with_its_definition) {
  for (const DeltaShape& shape : kShapes) {
    check_definition<float>(context, shape);
    check_definition<bf16>(context, shape);
  }
}

// Streams of several lengths, cut in several ways and side by side, in every number of threads.
template <class T>
void check_cuts(const Context& context, const DeltaShape& shape) {
  const std::vector<int64_t> lengths{1, 5, 64, 65, 131};
  std::vector<Stream<T>> streams;
  std::vector<std::vector<T>> alone;
  std::vector<std::vector<uint8_t>> states;
  for (size_t i = 0; i < lengths.size(); i++) {
    streams.emplace_back(shape, lengths[i], 11 + i);
    Net<T> net(context, shape, 2);
    alone.push_back(net.step(streams, {{int(i), 0, lengths[i], -1, 1}}, 0));
    states.push_back(net.pools.bytes(1));
  }
  const int64_t width = shape.value_width();
  for (size_t threads = 0; threads < context.executors.size(); threads++) {
    Random random(5 + threads);
    Net<T> net(context, shape, 2 * int64_t(lengths.size()));
    std::vector<int64_t> done(lengths.size(), 0);
    for (bool is_over = false; !is_over;) {
      std::vector<Part> parts;
      is_over = true;
      for (size_t i = 0; i < lengths.size(); i++) {
        int64_t count = std::min<int64_t>(lengths[i] - done[i], random.below(40));
        // The state stays in its slot or goes on in the stream's other one.
        int32_t initial = done[i] == 0 ? -1 : int32_t(2 * i + size_t(done[i] % 2));
        int32_t kept = int32_t(2 * i + size_t((done[i] + count) % 2));
        parts.push_back({int(i), done[i], done[i] + count, initial, kept});
        is_over &= done[i] + count == lengths[i];
      }
      std::vector<T> out = net.step(streams, parts, threads);
      const T* at = out.data();
      for (const Part& part : parts) {
        const int64_t count = part.end - part.begin;
        CHECK(same_bits(at, alone[size_t(part.stream)].data() + part.begin * width, count * width));
        at += count * width;
        done[size_t(part.stream)] = part.end;
      }
    }
    for (size_t i = 0; i < lengths.size(); i++) {
      CHECK(net.pools.bytes(int64_t(2 * i) + lengths[i] % 2) == states[i]);
    }
  }
}

TEST(gated_delta_has_the_same_bits_however_streams_are_cut_and_batched) {
  for (const DeltaShape& shape : kShapes) {
    check_cuts<float>(context, shape);
    check_cuts<bf16>(context, shape);
  }
}

// The states behind the tokens in between, kept beside the last one.
template <class T>
void check_kept(const Context& context, const DeltaShape& shape) {
  const int64_t tokens = 70;
  std::vector<Stream<T>> streams{{shape, tokens, 9}};
  Net<T> whole(context, shape, 5);
  whole.step(streams, {{0, 0, tokens, -1, 4, {{0, 0}, {2, 1}, {63, 2}, {64, 3}}}}, 2);
  for (auto [count, slot] : {std::pair{1, 0}, {3, 1}, {64, 2}, {65, 3}, {70, 4}}) {
    Net<T> prefix(context, shape, 1);
    prefix.step(streams, {{0, 0, count, -1, 0}}, 0);
    CHECK(prefix.pools.bytes(0) == whole.pools.bytes(slot));
  }
  // Drafts: tokens that begin with a slot, of which the first one's state takes its place.
  Net<T> drafted(context, shape, 3);
  drafted.step(streams, {{0, 0, 10, -1, 0}}, 0);
  drafted.step(streams, {{0, 10, 13, 0, 2, {{10, 0}, {11, 1}}}}, 1);
  for (int32_t slot = 0; slot < 3; slot++) {
    Net<T> prefix(context, shape, 1);
    prefix.step(streams, {{0, 0, 11 + slot, -1, 0}}, 0);
    CHECK(prefix.pools.bytes(0) == drafted.pools.bytes(slot));
  }
}

TEST(gated_delta_keeps_the_state_behind_any_token) {
  check_kept<float>(context, kShapes[1]);
  check_kept<bf16>(context, kShapes[2]);
}

TEST(gated_delta_writes_no_other_slot_and_no_other_layer) {
  const DeltaShape& shape = kShapes[1];
  std::vector<Stream<float>> streams{{shape, 9, 2}};
  Net<float> net(context, shape, 3);
  net.step(streams, {{0, 0, 9, -1, 1}}, 0);
  for (int64_t place = 0; place < 3 * kLayers; place++) {
    const bool is_kept = place == 1 * kLayers + kLayer;
    for (int64_t i = 0; i < shape.state_size(); i++) {
      CHECK(std::isnan(net.pools.state[size_t(place * shape.state_size() + i)]) == !is_kept);
    }
  }
}

// A row of NaN beside others leaves them as they are.
TEST(gated_delta_of_a_row_does_not_reach_its_neighbours) {
  const DeltaShape& shape = kShapes[1];
  std::vector<Stream<float>> streams{{shape, 9, 2}, {shape, 9, 3}};
  for (float& each : streams[1].x) each = kNaN;
  Net<float> alone(context, shape, 2), beside(context, shape, 2);
  std::vector<float> one = alone.step(streams, {{0, 0, 9, -1, 0}}, 0);
  std::vector<float> both = beside.step(streams, {{1, 0, 9, -1, 1}, {0, 0, 9, -1, 0}}, 1);
  CHECK(same_bits(one.data(), both.data() + one.size(), int64_t(one.size())));
  CHECK(alone.pools.bytes(0) == beside.pools.bytes(0));
}

}  // namespace
}  // namespace cadenza::tests
