// Scores of prompts: compared with double precision, and bitwise independence of chunks, other rows and
// threads. Queries and keys are neither normed nor rotated.
#include "tests/attention.h"

namespace cadenza::tests {
namespace {

// A prompt's last step beside `others` rows, which score, too.
template <class T>
struct Scoring {
  const Context& context;
  Shape shape;
  Sequence<T> prompt;

  int64_t stride() const { return round_up(prompt.length, kLanes); }

  // The scores of the prompt's keys by its last token, in a step of `chunk` tokens, by `layers` layers of
  // equal keys.
  std::vector<float> scores(int64_t chunk, size_t threads, int others, int layers = 1) const {
    Engine<T> engine(context, shape, 16, (others + 1) * (prompt.length / 16 + 2), uint64_t(chunk));
    std::vector<typename Engine<T>::Chunk> last;
    std::vector<Sequence<T>> sequences;
    for (int i = 0; i < others; i++) {
      sequences.push_back(random_sequence<T>(shape, prompt.length - 9 * (i + 1), uint64_t(90 + i)));
    }
    for (const auto& each : sequences) last.push_back({engine.add_row(), &each, each.length});
    const int row = engine.add_row();
    int64_t done = 0;
    for (; done + chunk < prompt.length; done += chunk) engine.step({{row, &prompt, chunk}}, threads);
    last.push_back({row, &prompt, prompt.length - done});
    std::vector<float> best(size_t((others + 1) * stride()), kNaN), sums = best;
    engine.after_step = [&](const AttendTask& task) {
      ScoreTask score{};
      score.attend = task;
      score.score_lens = task.kv_lens;
      score.stride = stride();
      score.best = best.data();
      score.sums = sums.data();
      for (int layer = 0; layer < layers; layer++) {
        score.is_first = layer == 0;
        score.is_last = layer == layers - 1;
        score_keys(context.runtime(threads), dtype_of<T>(), score);
      }
    };
    engine.step(last, threads);
    const float* own = sums.data() + others * stride();
    return {own, own + prompt.length};
  }

  double element(int64_t position, int64_t head, int64_t i) const {
    return widen(prompt.qkv[size_t(position * shape.width() + head * shape.size + i)]);
  }

  std::vector<double> in_double() const {
    std::vector<double> best(size_t(prompt.length), 0.0);
    for (int64_t head = 0; head < shape.heads; head++) {
      std::vector<double> weights(best.size() + kPool - 1, 0.0);
      const int64_t kv = shape.heads + head * shape.kv_heads / shape.heads;
      double total = 0;
      for (int64_t p = 0; p < prompt.length; p++) {
        double dot = 0;
        for (int64_t i = 0; i < shape.size; i++) dot += element(prompt.length - 1, head, i) * element(p, kv, i);
        total += weights[size_t(p) + kPool / 2] = std::exp(dot / std::sqrt(double(shape.size)));
      }
      for (size_t p = 0; p < best.size(); p++) {
        double sum = 0;
        for (size_t j = 0; j < kPool; j++) sum += weights[p + j];
        best[p] = std::max(best[p], sum / total / kPool);
      }
    }
    return best;
  }
};

template <class T>
void check(const Context& context, Shape shape, int64_t length, double tolerance) {
  const Scoring<T> scoring{context, shape, random_sequence<T>(shape, length, 17)};
  const std::vector<float> alone = scoring.scores(1, 0, 0);
  const std::vector<double> expected = scoring.in_double();
  for (size_t p = 0; p < alone.size(); p++) CHECK_NEAR(alone[p] / expected[p], 1, tolerance);
  for (size_t threads = 0; threads < 3; threads++) {
    for (int64_t chunk : {int64_t(7), length}) {
      const std::vector<float> other = scoring.scores(chunk, threads, int(threads), 1 + int(threads));
      CHECK(same_bits(other.data(), alone.data(), length));
    }
  }
}

TEST(prompt_scores_agree_with_double_precision_in_every_chunk_and_company) {
  const int64_t length = context.quick ? 70 : 1100;
  check<float>(context, {6, 2, 32, 0}, length, 1e-5);
  check<float>(context, {10, 1, 80, 0}, length, 1e-5);
  check<bf16>(context, {4, 4, 64, 0}, length, 1e-5);
  check<float>(context, Shape{6, 2, 32, 0}.with_codes(), length, 0.05);
}

TEST(a_prompt_key_that_is_not_finite_makes_all_scores_nan) {
  Scoring<float> scoring{context, {4, 2, 32, 0}, random_sequence<float>({4, 2, 32, 0}, 600, 3)};
  // Of the first KV head alone: the largest of all heads must keep it.
  set(scoring.prompt.qkv[size_t(540 * scoring.shape.width() + 4 * 32)], kNaN);
  for (float score : scoring.scores(64, 1, 0)) CHECK(score != score);
}

}  // namespace
}  // namespace cadenza::tests
