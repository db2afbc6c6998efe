// The gated delta net: its definition in double precision, and that no cut, row or slot changes a bit.
#include "tests/recurrent.h"

namespace cadenza::tests {
namespace {

constexpr float kEps = 1e-6f;

struct DeltaShape {
  int64_t key_heads, value_heads, key_size, value_size, taps;
  bool tiled = false;
};

constexpr DeltaShape kShapes[] = {{1, 1, 16, 16, 2}, {2, 6, 32, 48, 4}, {2, 2, 128, 128, 4},
                                  {2, 6, 16, 32, 3, true}};

template <class T>
struct GatedDelta {
  using Element = T;
  DeltaShape shape;
  std::vector<float> conv, decay, decay_bias, norm;

  explicit GatedDelta(const DeltaShape& shape_) : shape(shape_) {
    Random random(3);
    conv = random_values<float>(random, shape.taps * channels(), 0.5f);
    norm = random_values<float>(random, shape.value_size);
    decay_bias = random_values<float>(random, shape.value_heads);
    for (int64_t head = 0; head < shape.value_heads; head++) {
      decay.push_back(-std::exp(random.normal() - 2));
    }
  }
  int64_t key_width() const { return shape.key_heads * shape.key_size; }
  int64_t value_width() const { return shape.value_heads * shape.value_size; }
  int64_t channels() const { return 2 * key_width() + value_width(); }
  StateShape state() const {
    return {channels(), shape.taps, shape.value_heads, shape.key_size, shape.value_size,
            channels(), value_width(), 2 * shape.value_heads, value_width()};
  }
  const float* conv_weight() const { return conv.data(); }
  const float* conv_bias() const { return nullptr; }

  void run(const Runtime& runtime, const Convolution& convolution, const StateMatrices& matrices,
           const Inputs<T>& inputs, T* out) const {
    gated_delta(runtime, dtype_of<T>(),
                {convolution, matrices, shape.key_heads, shape.tiled, inputs.x.data(), inputs.gate.data(),
                 inputs.rates.data(), decay.data(), decay_bias.data(), norm.data(), kEps, nullptr,
                 out});
  }

  std::vector<double> define(const Inputs<T>& stream, int64_t tokens) const {
    const int64_t dk = shape.key_size, dv = shape.value_size, width = channels();
    std::vector<double> mixed =
        define_conv(state(), conv.data(), nullptr, tokens, [&](int64_t t, int64_t c) {
          return double(widen(stream.x[size_t(t * width + c)]));
        });
    for (double& each : mixed) each = silu(each);
    std::vector<double> out(size_t(tokens * value_width()));
    for (int64_t head = 0; head < shape.value_heads; head++) {
      std::vector<double> matrix(size_t(dk * dv), 0);
      const int64_t group = shape.value_heads / shape.key_heads;
      const int64_t key_head = shape.tiled ? head % shape.key_heads : head / group;
      for (int64_t t = 0; t < tokens; t++) {
        const double* q = &mixed[size_t(t * width + key_head * dk)];
        const double* k = q + key_width();
        const double* v = &mixed[size_t(t * width + 2 * key_width() + head * dv)];
        double qq = 1e-6, kk = 1e-6, squares = 0;
        for (int64_t i = 0; i < dk; i++) qq += q[i] * q[i], kk += k[i] * k[i];
        const float* rates = &stream.rates[size_t(t * 2 * shape.value_heads + head)];
        double softplus = std::log1p(std::exp(double(rates[0]) + decay_bias[size_t(head)]));
        double kept = std::exp(decay[size_t(head)] * softplus);
        double strength = 1 / (1 + std::exp(-double(rates[shape.value_heads])));
        std::vector<double> y(static_cast<size_t>(dv), 0);
        for (int64_t j = 0; j < dv; j++) {
          double read = 0;
          for (int64_t i = 0; i < dk; i++) {
            matrix[size_t(i * dv + j)] *= kept;
            read += matrix[size_t(i * dv + j)] * k[i] / std::sqrt(kk);
          }
          for (int64_t i = 0; i < dk; i++) {
            double& at = matrix[size_t(i * dv + j)];
            at += k[i] / std::sqrt(kk) * (v[j] - read) * strength;
            y[size_t(j)] += at * q[i] / std::sqrt(qq * double(dk));
          }
          squares += y[size_t(j)] * y[size_t(j)];
        }
        double scale = 1 / std::sqrt(squares / double(dv) + kEps);
        for (int64_t j = 0; j < dv; j++) {
          size_t at = size_t((t * shape.value_heads + head) * dv + j);
          out[at] = y[size_t(j)] * scale * norm[size_t(j)] * silu(widen(stream.gate[at]));
        }
      }
    }
    return out;
  }
};

TEST(gated_delta_agrees_with_its_definition) {
  for (const DeltaShape& shape : kShapes) {
    check_definition(context, GatedDelta<float>(shape));
    check_definition(context, GatedDelta<bf16>(shape));
  }
}

TEST(gated_delta_has_the_same_bits_however_streams_are_cut_and_batched) {
  for (const DeltaShape& shape : kShapes) {
    check_cuts(context, GatedDelta<float>(shape));
    check_cuts(context, GatedDelta<bf16>(shape));
  }
}

TEST(gated_delta_keeps_the_state_behind_any_token) {
  check_kept(context, GatedDelta<float>(kShapes[1]));
  check_kept(context, GatedDelta<bf16>(kShapes[2]));
}

TEST(gated_delta_writes_no_other_slot_and_no_other_layer) {
  check_other_slots(context, GatedDelta<float>(kShapes[1]));
}

TEST(gated_delta_of_a_row_does_not_reach_its_neighbours) {
  check_neighbours(context, GatedDelta<float>(kShapes[1]));
}

}  // namespace
}  // namespace cadenza::tests
