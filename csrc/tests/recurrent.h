// What the tests of layers with a state share: pools, and checks that no cut, row or slot changes a bit.
#pragma once

#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {

constexpr int64_t kLayers = 2, kLayer = 1;

// Sizes of a layer with a state: of its state, and of a token's inputs and output.
struct StateShape {
  int64_t channels, taps, heads, keys, values;
  int64_t x_width, gate_width, rates_width, out_width;

  int64_t state_size() const { return heads * keys * values; }
};

// The inputs of a sequence, or of a step.
template <class T>
struct Inputs {
  std::vector<T> x, gate;
  std::vector<float> rates;

  Inputs() = default;
  Inputs(const StateShape& shape, int64_t tokens, uint64_t seed) {
    Random random(seed);
    x = random_values<T>(random, tokens * shape.x_width);
    gate = random_values<T>(random, tokens * shape.gate_width);
    rates = random_values<float>(random, tokens * shape.rates_width, 2);
  }
  void append(const Inputs& from, int64_t begin, int64_t end, const StateShape& shape) {
    auto add = [&](auto& to, const auto& side, int64_t width) {
      to.insert(to.end(), side.begin() + begin * width, side.begin() + end * width);
    };
    add(x, from.x, shape.x_width);
    add(gate, from.gate, shape.gate_width);
    add(rates, from.rates, shape.rates_width);
  }
};

template <class T>
struct Pools {
  int64_t slots, conv_size, state_size;
  std::vector<T> conv;
  std::vector<float> state;

  // Slots that are not written hold NaN.
  Pools(const StateShape& shape, int64_t slots_)
      : slots(slots_), conv_size((shape.taps - 1) * shape.channels),
        state_size(shape.state_size()), conv(size_t(slots * kLayers * conv_size)),
        state(size_t(slots * kLayers * state_size), kNaN) {
    for (T& each : conv) set(each, kNaN);
  }
  std::vector<uint8_t> bytes(int64_t slot) const {
    const int64_t at = slot * kLayers + kLayer;
    std::vector<uint8_t> all(size_t(conv_size) * sizeof(T) + size_t(state_size) * 4);
    std::memcpy(all.data(), conv.data() + at * conv_size, size_t(conv_size) * sizeof(T));
    if (state_size > 0) {
      std::memcpy(all.data() + size_t(conv_size) * sizeof(T), state.data() + at * state_size,
                  size_t(state_size) * 4);
    }
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

// A layer over pools of its own. `Layer` has the type `Element` of activations, its sizes (`state()`),
// its kernel (`run`) and its definition in double precision (`define`).
template <class Layer>
class Net {
  using T = typename Layer::Element;

 public:
  Net(const Context& context, const Layer& layer, int64_t slots)
      : pools(layer.state(), slots), context_(context), layer_(layer) {}

  // The outputs of a step's parts, one after the other.
  std::vector<T> step(const std::vector<Inputs<T>>& streams, const std::vector<Part>& parts,
                      size_t threads) {
    const StateShape shape = layer_.state();
    Inputs<T> inputs;
    std::vector<int32_t> starts{0}, initial, kept;
    for (const Part& part : parts) {
      inputs.append(streams[size_t(part.stream)], part.begin, part.end, shape);
      initial.push_back(part.initial);
      kept.resize(kept.size() + size_t(part.end - part.begin), -1);
      for (auto [token, slot] : part.also_kept) {
        kept[size_t(starts.back() + token - part.begin)] = slot;
      }
      if (part.end > part.begin) kept.back() = part.kept;
      starts.push_back(starts.back() + int32_t(part.end - part.begin));
    }
    std::vector<T> out(kept.size() * size_t(shape.out_width));
    const StateRows rows{int64_t(parts.size()), starts.data(), initial.data(), kept.data(),
                         pools.slots, kLayers, kLayer};
    const Convolution conv{rows, shape.channels, shape.taps, layer_.conv_weight(),
                           layer_.conv_bias(), pools.conv.data()};
    const StateMatrices matrices{pools.state.data(), shape.heads, shape.keys, shape.values};
    layer_.run(context_.runtime(threads), conv, matrices, inputs, out.data());
    return out;
  }

  Pools<T> pools;

 private:
  const Context& context_;
  const Layer& layer_;
};

inline double silu(double x) { return x / (1 + std::exp(-x)); }

// The definition of a causal depthwise convolution: the sums [tokens, channels] of `input(t, c)`.
template <class Input>
std::vector<double> define_conv(const StateShape& shape, const float* weight, const float* bias,
                                int64_t tokens, Input input) {
  std::vector<double> sums(size_t(tokens * shape.channels));
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t c = 0; c < shape.channels; c++) {
      double sum = bias == nullptr ? 0 : bias[c];
      for (int64_t tap = 0; tap < shape.taps; tap++) {
        int64_t from = t - shape.taps + 1 + tap;
        if (from >= 0) sum += input(from, c) * weight[tap * shape.channels + c];
      }
      sums[size_t(t * shape.channels + c)] = sum;
    }
  }
  return sums;
}

template <class Layer>
void check_definition(const Context& context, const Layer& layer) {
  using T = typename Layer::Element;
  const int64_t tokens = 70;
  std::vector<Inputs<T>> streams{{layer.state(), tokens, 7}};
  Net<Layer> net(context, layer, 1);
  std::vector<T> out = net.step(streams, {{0, 0, tokens, -1, -1}}, 1);
  std::vector<double> expected = layer.define(streams[0], tokens);
  CHECK(out.size() == expected.size());
  for (size_t i = 0; i < out.size(); i++) {
    CHECK_NEAR(widen(out[i]), expected[i], kEpsilon<T> * std::abs(expected[i]) + 2e-4);
  }
}

// Streams of several lengths, cut in several ways and side by side, in every number of threads.
template <class Layer>
void check_cuts(const Context& context, const Layer& layer) {
  using T = typename Layer::Element;
  const std::vector<int64_t> lengths{1, 5, 64, 65, 131};
  std::vector<Inputs<T>> streams;
  std::vector<std::vector<T>> alone;
  std::vector<std::vector<uint8_t>> states;
  for (size_t i = 0; i < lengths.size(); i++) {
    streams.emplace_back(layer.state(), lengths[i], 11 + i);
    Net<Layer> net(context, layer, 2);
    alone.push_back(net.step(streams, {{int(i), 0, lengths[i], -1, 1}}, 0));
    states.push_back(net.pools.bytes(1));
  }
  const int64_t width = layer.state().out_width;
  for (size_t threads = 0; threads < context.executors.size(); threads++) {
    Random random(5 + threads);
    Net<Layer> net(context, layer, 2 * int64_t(lengths.size()));
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

// The states behind the tokens in between, kept beside the last one.
template <class Layer>
void check_kept(const Context& context, const Layer& layer) {
  using T = typename Layer::Element;
  const int64_t tokens = 70;
  std::vector<Inputs<T>> streams{{layer.state(), tokens, 9}};
  Net<Layer> whole(context, layer, 5);
  whole.step(streams, {{0, 0, tokens, -1, 4, {{0, 0}, {2, 1}, {63, 2}, {64, 3}}}}, 2);
  for (auto [count, slot] : {std::pair{1, 0}, {3, 1}, {64, 2}, {65, 3}, {70, 4}}) {
    Net<Layer> prefix(context, layer, 1);
    prefix.step(streams, {{0, 0, count, -1, 0}}, 0);
    CHECK(prefix.pools.bytes(0) == whole.pools.bytes(slot));
  }
  // Drafts: tokens that begin with a slot, of which the first one's state takes its place.
  Net<Layer> drafted(context, layer, 3);
  drafted.step(streams, {{0, 0, 10, -1, 0}}, 0);
  drafted.step(streams, {{0, 10, 13, 0, 2, {{10, 0}, {11, 1}}}}, 1);
  for (int32_t slot = 0; slot < 3; slot++) {
    Net<Layer> prefix(context, layer, 1);
    prefix.step(streams, {{0, 0, 11 + slot, -1, 0}}, 0);
    CHECK(prefix.pools.bytes(0) == drafted.pools.bytes(slot));
  }
}

template <class Layer>
void check_other_slots(const Context& context, const Layer& layer) {
  using T = typename Layer::Element;
  std::vector<Inputs<T>> streams{{layer.state(), 9, 2}};
  Net<Layer> net(context, layer, 3);
  net.step(streams, {{0, 0, 9, -1, 1}}, 0);
  for (int64_t place = 0; place < 3 * kLayers; place++) {
    const bool is_kept = place == 1 * kLayers + kLayer;
    auto check = [&](const auto& pool, int64_t size) {
      for (int64_t i = 0; i < size; i++) {
        CHECK(std::isnan(widen(pool[size_t(place * size + i)])) == !is_kept);
      }
    };
    check(net.pools.conv, net.pools.conv_size);
    check(net.pools.state, net.pools.state_size);
  }
}

// A row of NaN beside others leaves them as they are.
template <class Layer>
void check_neighbours(const Context& context, const Layer& layer) {
  using T = typename Layer::Element;
  std::vector<Inputs<T>> streams{{layer.state(), 9, 2}, {layer.state(), 9, 3}};
  for (T& each : streams[1].x) set(each, kNaN);
  Net<Layer> alone(context, layer, 2), beside(context, layer, 2);
  std::vector<T> one = alone.step(streams, {{0, 0, 9, -1, 0}}, 0);
  std::vector<T> both = beside.step(streams, {{1, 0, 9, -1, 1}, {0, 0, 9, -1, 0}}, 1);
  CHECK(same_bits(one.data(), both.data() + one.size(), int64_t(one.size())));
  CHECK(alone.pools.bytes(0) == beside.pools.bytes(0));
}

}  // namespace cadenza::tests
