// The selective scan of Mamba-2: its definition, and that no cut, row or slot changes a bit.
#include "tests/recurrent.h"

namespace cadenza::tests {
namespace {

constexpr float kEps = 1e-6f;

struct ScanShape {
  int64_t heads, groups, keys, values, taps;
};

constexpr ScanShape kShapes[] = {{1, 1, 16, 16, 2}, {6, 2, 32, 48, 4}, {3, 1, 128, 64, 4}};

template <class T>
struct SelectiveScan {
  using Element = T;
  ScanShape shape;
  std::vector<float> conv, bias, decay, rate_bias, skip, norm;

  explicit SelectiveScan(const ScanShape& shape_) : shape(shape_) {
    Random random(3);
    conv = random_values<float>(random, shape.taps * channels(), 0.5f);
    if (shape.heads > 1) bias = random_values<float>(random, channels(), 0.3f);
    norm = random_values<float>(random, width());
    rate_bias = random_values<float>(random, shape.heads, 2);
    skip = random_values<float>(random, shape.heads);
    for (int64_t head = 0; head < shape.heads; head++) {
      decay.push_back(-std::exp(random.normal() - 2));
    }
  }
  int64_t width() const { return shape.heads * shape.values; }
  int64_t channels() const { return width() + 2 * shape.groups * shape.keys; }
  StateShape state() const {
    return {channels(), shape.taps, shape.heads, shape.keys, shape.values,
            channels(), width(), shape.heads, width()};
  }
  const float* conv_weight() const { return conv.data(); }
  const float* conv_bias() const { return bias.empty() ? nullptr : bias.data(); }

  void run(const Runtime& runtime, const Convolution& convolution, const StateMatrices& matrices,
           const Inputs<T>& inputs, T* out) const {
    selective_scan(runtime, dtype_of<T>(),
                   {convolution, matrices, shape.groups, inputs.x.data(), inputs.gate.data(),
                    inputs.rates.data(), decay.data(), rate_bias.data(), skip.data(), norm.data(),
                    kEps, nullptr, nullptr, out});
  }

  std::vector<double> define(const Inputs<T>& stream, int64_t tokens) const {
    const int64_t n = shape.keys, p = shape.values, all = channels();
    std::vector<double> mixed =
        define_conv(state(), conv.data(), conv_bias(), tokens, [&](int64_t t, int64_t c) {
          return double(widen(stream.x[size_t(t * all + c)]));
        });
    for (double& each : mixed) each = silu(each);
    std::vector<double> out(size_t(tokens * width()));
    for (int64_t head = 0; head < shape.heads; head++) {
      std::vector<double> matrix(size_t(n * p), 0);
      const int64_t group = head / (shape.heads / shape.groups);
      for (int64_t t = 0; t < tokens; t++) {
        const double* x = &mixed[size_t(t * all + head * p)];
        const double* b = &mixed[size_t(t * all + width() + group * n)];
        const double* c = b + shape.groups * n;
        double given = stream.rates[size_t(t * shape.heads + head)];
        double rate = std::log1p(std::exp(given + rate_bias[size_t(head)]));
        double kept = std::exp(rate * decay[size_t(head)]);
        for (int64_t j = 0; j < p; j++) {
          double y = skip[size_t(head)] * x[j];
          for (int64_t i = 0; i < n; i++) {
            double& at = matrix[size_t(i * p + j)];
            at = kept * at + b[i] * rate * x[j];
            y += at * c[i];
          }
          size_t place = size_t((t * shape.heads + head) * p + j);
          out[place] = y * silu(widen(stream.gate[place]));
        }
      }
    }
    const int64_t group_width = width() / shape.groups;
    for (size_t first = 0; first < out.size(); first += size_t(group_width)) {
      double squares = 0;
      for (int64_t i = 0; i < group_width; i++) squares += out[first + size_t(i)] * out[first + size_t(i)];
      double scale = 1 / std::sqrt(squares / double(group_width) + kEps);
      for (int64_t i = 0; i < group_width; i++) {
        const size_t at = first + size_t(i);
        out[at] *= scale * norm[at % size_t(width())];
      }
    }
    return out;
  }
};

TEST(selective_scan_agrees_with_its_definition) {
  for (const ScanShape& shape : kShapes) {
    check_definition(context, SelectiveScan<float>(shape));
    check_definition(context, SelectiveScan<bf16>(shape));
  }
}

TEST(selective_scan_has_the_same_bits_however_streams_are_cut_and_batched) {
  for (const ScanShape& shape : kShapes) {
    check_cuts(context, SelectiveScan<float>(shape));
    check_cuts(context, SelectiveScan<bf16>(shape));
  }
}

TEST(selective_scan_keeps_the_state_behind_any_token) {
  check_kept(context, SelectiveScan<float>(kShapes[1]));
  check_kept(context, SelectiveScan<bf16>(kShapes[2]));
}

TEST(selective_scan_writes_no_other_slot_and_no_other_layer) {
  check_other_slots(context, SelectiveScan<float>(kShapes[1]));
}

TEST(selective_scan_of_a_row_does_not_reach_its_neighbours) {
  check_neighbours(context, SelectiveScan<float>(kShapes[1]));
}

}  // namespace
}  // namespace cadenza::tests
