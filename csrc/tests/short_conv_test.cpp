// The gated short convolution: its definition, and that no cut, row or slot changes a bit.
#include "tests/recurrent.h"

namespace cadenza::tests {
namespace {

// Widths that fill the last unit of channels, and that do not.
constexpr int64_t kSizes[][2] = {{16, 2}, {80, 3}, {128, 5}};  // channels, taps

template <class T>
struct ShortConv {
  using Element = T;
  int64_t channels, taps;
  std::vector<float> conv, bias;

  explicit ShortConv(const int64_t (&size)[2]) : channels(size[0]), taps(size[1]) {
    Random random(3);
    conv = random_values<float>(random, taps * channels, 0.5f);
    if (channels != 16) bias = random_values<float>(random, channels);
  }
  StateShape state() const {
    return {channels, taps, 0, 0, 0, 3 * channels, 0, 0, channels};
  }
  const float* conv_weight() const { return conv.data(); }
  const float* conv_bias() const { return bias.empty() ? nullptr : bias.data(); }

  void run(const Runtime& runtime, const Convolution& convolution, const StateMatrices&,
           const Inputs<T>& inputs, T* out) const {
    short_conv(runtime, dtype_of<T>(), {convolution, inputs.x.data(), out});
  }

  double input(const Inputs<T>& stream, int64_t t, int64_t part, int64_t c) const {
    return widen(stream.x[size_t((3 * t + part) * channels + c)]);
  }
  std::vector<double> define(const Inputs<T>& stream, int64_t tokens) const {
    std::vector<double> out =
        define_conv(state(), conv.data(), conv_bias(), tokens, [&](int64_t t, int64_t c) {
          T kept;  // the convolution's inputs have the type of the activations
          set(kept, float(input(stream, t, 0, c) * input(stream, t, 2, c)));
          return double(widen(kept));
        });
    for (size_t i = 0; i < out.size(); i++) {
      out[i] *= input(stream, int64_t(i) / channels, 1, int64_t(i) % channels);
    }
    return out;
  }
};

TEST(short_conv_agrees_with_its_definition) {
  for (const auto& size : kSizes) {
    check_definition(context, ShortConv<float>(size));
    check_definition(context, ShortConv<bf16>(size));
  }
}

TEST(short_conv_has_the_same_bits_however_streams_are_cut_and_batched) {
  for (const auto& size : kSizes) {
    check_cuts(context, ShortConv<float>(size));
    check_cuts(context, ShortConv<bf16>(size));
  }
}

TEST(short_conv_keeps_the_state_behind_any_token) {
  check_kept(context, ShortConv<float>(kSizes[2]));
  check_kept(context, ShortConv<bf16>(kSizes[1]));
}

TEST(short_conv_writes_no_other_slot_and_no_other_layer) {
  check_other_slots(context, ShortConv<float>(kSizes[1]));
}

TEST(short_conv_of_a_row_does_not_reach_its_neighbours) {
  check_neighbours(context, ShortConv<float>(kSizes[1]));
}

}  // namespace
}  // namespace cadenza::tests
