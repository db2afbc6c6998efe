// Attention: compared with double precision, and bitwise independence of chunks, pages, other rows
// and threads.
#include "tests/attention.h"

namespace cadenza::tests {
namespace {

// Reference in double precision: norm and RoPE of one head, rounded to T as in the kernel. A query
// over KV in int8 is not.
template <class T>
std::vector<double> reference_head(const Shape& shape, const Engine<T>& engine,
                                   const Sequence<T>& sequence, int64_t position, int64_t head) {
  const T* raw = sequence.qkv.data() + position * shape.width() + head * shape.size;
  std::vector<double> x(size_t(shape.size));
  for (int64_t i = 0; i < shape.size; i++) x[size_t(i)] = widen(raw[i]);
  if (head >= shape.heads + shape.kv_heads) return x;
  if (shape.has_norm) {
    bool is_query = head < shape.heads, spans = shape.norm_spans_heads;
    const auto& weight = is_query ? engine.q_weight() : engine.k_weight();
    int64_t kind = is_query ? 0 : shape.heads, first = spans ? kind : head;
    int64_t width = shape.size * (!spans ? 1 : is_query ? shape.heads : shape.kv_heads);
    const T* from = sequence.qkv.data() + position * shape.width() + first * shape.size;
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += std::pow(double(widen(from[i])), 2);
    double scale = 1 / std::sqrt(squares / double(width) + 1e-6);
    size_t offset = spans ? size_t((head - kind) * shape.size) : 0;
    for (size_t i = 0; i < x.size(); i++) x[i] *= scale * weight[offset + i];
  }
  int64_t half = shape.rotary / 2;
  for (int64_t i = 0; i < half; i++) {
    double c = engine.rope()[size_t(position * shape.rotary + i)];
    double s = engine.rope()[size_t(position * shape.rotary + half + i)];
    double a = x[size_t(i)], b = x[size_t(half + i)];
    x[size_t(i)] = a * c - b * s;
    x[size_t(half + i)] = b * c + a * s;
  }
  if (head < shape.heads && shape.kv_format == KvFormat::kInt8) return x;
  for (double& v : x) {
    T rounded;
    set(rounded, float(v));
    v = widen(rounded);
  }
  return x;
}

// The value of a KV head, rounded to T if it is normed.
template <class T>
std::vector<double> reference_value(const Shape& shape, const Engine<T>& engine,
                                    const Sequence<T>& sequence, int64_t position, int64_t kv) {
  if (!shape.norms_values) {
    return reference_head(shape, engine, sequence, position, shape.heads + shape.kv_heads + kv);
  }
  const int64_t head = shape.heads + (shape.kv_parts - 1) * shape.kv_heads + kv;
  const T* raw = sequence.qkv.data() + position * shape.width() + head * shape.size;
  std::vector<double> x(size_t(shape.size));
  double squares = 0;
  for (int64_t i = 0; i < shape.size; i++) squares += std::pow(double(widen(raw[i])), 2);
  for (int64_t i = 0; i < shape.size; i++) {
    T rounded;
    set(rounded, float(widen(raw[i]) / std::sqrt(squares / double(shape.size) + 1e-6)));
    x[size_t(i)] = widen(rounded);
  }
  return x;
}

// Rounds `count` elements to the multiples that their codes, of at most `most`, stand for
// (core/kv_codes.h); returns the scale.
double round_to_codes(double* x, size_t count, double most = 127) {
  double largest = 0;
  for (size_t i = 0; i < count; i++) largest = std::max(largest, std::abs(x[i]));
  if (largest == 0) return 0;
  for (size_t i = 0; i < count; i++) x[i] = std::nearbyint(x[i] * most / largest) * largest / most;
  return largest / most;
}

// The weights of tokens from `begin` on as the codes of their sub-blocks stand for them.
void round_weights(std::vector<double>& weights, int64_t begin, const std::vector<double>& scales) {
  for (size_t i = 0; i < weights.size();) {
    size_t count = std::min(weights.size() - i, kLanes - (size_t(begin) + i) % kLanes);
    for (size_t j = i; j < i + count; j++) weights[j] *= scales[size_t(begin) + j];
    round_to_codes(&weights[i], count, kMostWeightCode);
    for (size_t j = i; j < i + count; j++) weights[j] /= scales[size_t(begin) + j];
    i += count;
  }
}

// Over KV in int8, an element on the edge between two codes may get the other one: the largest
// error is that of a code, while the mean is almost as small as without codes.
template <class T>
void check_reference(const Context& context, Shape shape, int64_t length) {
  const bool has_codes = shape.kv_format == KvFormat::kInt8;
  double errors = 0, count = 0;
  Sequence<T> sequence = random_sequence<T>(shape, length, 11);
  Engine<T> engine(context, shape, 16, length / 16 + 2, 1);
  std::vector<T> out = in_chunks(engine, sequence, length, 1);
  std::vector<std::vector<double>> keys, values;
  std::vector<double> value_scales;
  for (int64_t h = 0; h < shape.heads; h++) {
    int64_t kv = shape.heads + h * shape.kv_heads / shape.heads;
    keys.clear(), values.clear(), value_scales.clear();
    for (int64_t p = 0; p < length; p++) {
      keys.push_back(reference_head(shape, engine, sequence, p, kv));
      values.push_back(reference_value(shape, engine, sequence, p, kv - shape.heads));
      if (!has_codes) continue;
      round_to_codes(keys.back().data(), keys.back().size());
      value_scales.push_back(round_to_codes(values.back().data(), values.back().size()));
    }
    for (int64_t p = 0; p < length; p += 7) {
      std::vector<double> q = reference_head(shape, engine, sequence, p, h);
      if (has_codes) round_to_codes(q.data(), q.size(), kMostCode * kFinePerCoarse);
      std::vector<double> sum(size_t(shape.size), 0.0), weights;
      int64_t begin = shape.window > 0 ? std::max<int64_t>(0, p - shape.window + 1) : 0;
      double total = 0, highest = -1e300;
      for (int64_t t = begin; t <= p; t++) {
        double score = 0;
        for (int64_t i = 0; i < shape.size; i++) score += q[size_t(i)] * keys[size_t(t)][size_t(i)];
        score /= std::sqrt(double(shape.size));
        if (shape.soft_cap > 0) score = shape.soft_cap * std::tanh(score / shape.soft_cap);
        weights.push_back(score);
        highest = std::max(highest, score);
      }
      for (double& weight : weights) {
        weight = std::exp(weight - highest);
        total += weight;
      }
      if (shape.has_sinks) total += std::exp(double(engine.sinks()[size_t(h)]) - highest);
      if (has_codes) round_weights(weights, begin, value_scales);
      for (int64_t t = begin; t <= p; t++) {
        for (int64_t i = 0; i < shape.size; i++)
          sum[size_t(i)] += weights[size_t(t - begin)] * values[size_t(t)][size_t(i)];
      }
      for (int64_t i = 0; i < shape.size; i++) {
        float mine = widen(out[size_t((p * shape.heads + h) * shape.size + i)]);
        if (shape.has_gate) {
          double gate = widen(sequence.qkv[size_t(p * shape.width() + h * shape.size + i)]);
          sum[size_t(i)] /= 1 + std::exp(-gate);
        }
        CHECK_NEAR(mine, sum[size_t(i)] / total, has_codes || kStep<T> == 2 ? 0.03 : 2e-4);
        errors += std::abs(double(mine) - sum[size_t(i)] / total);
        count++;
      }
    }
  }
  CHECK_NEAR(errors / count, 0, kStep<T> == 2 ? 2e-3 : has_codes ? 5e-5 : 1e-5);
}

std::vector<Shape> shapes(bool quick) {
  if (quick)
    return {{4, 2, 64, 64}, {3, 1, 80, 32, 40, 5.0f, true}, {6, 2, 48, 0, 0, 0, true, true}};
  return {{9, 3, 64, 64},      {4, 4, 80, 80},
          {8, 2, 96, 48},      {5, 1, 128, 128, 0, 0, true},
          {2, 1, 256, 64},     {6, 2, 16, 16},
          {4, 2, 64, 64, 100}, {4, 2, 64, 64, 0, 20.0f},
          {3, 1, 112, 40},     {8, 8, 64, 64, 600, 0, true},
          {6, 2, 48, 0},       {6, 2, 48, 48, 0, 0, true, true}};
}

TEST(attention_agrees_with_double_precision) {
  for (const Shape& shape : shapes(context.quick)) {
    check_reference<bf16>(context, shape, 75);
    check_reference<float>(context, shape, context.quick ? 40 : 530);
    if (!context.quick) check_reference<float>(context, shape.with_codes(), 530);
  }
}

TEST(attention_with_sinks_and_an_output_gate_agrees_with_double_precision) {
  const Shape shape = Shape{6, 2, 32, 16, 40}.with_sinks_and_gate();
  check_reference<bf16>(context, shape, 75);
  check_reference<float>(context, shape, context.quick ? 40 : 530);
  check_reference<float>(context, shape.with_codes(), 75);
}

template <class T>
void check_chunks(const Context& context, Shape shape, int64_t length) {
  Sequence<T> sequence = random_sequence<T>(shape, length, 21);
  Engine<T> one_by_one(context, shape, 16, length / 16 + 2, 1);
  std::vector<T> expected = in_chunks(one_by_one, sequence, 1, 0);
  std::vector<int64_t> chunks = context.quick ? std::vector<int64_t>{7, length}
                                              : std::vector<int64_t>{2, 3, 7, 16, 33, 100, length};
  for (int64_t chunk : chunks) {
    for (int64_t page_size : {16, 48}) {
      for (size_t threads = 0; threads < 3; threads++) {
        Engine<T> engine(context, shape, page_size, length / page_size + 2, uint64_t(chunk));
        std::vector<T> out = in_chunks(engine, sequence, chunk, threads);
        CHECK(same_bits(out.data(), expected.data(), int64_t(out.size())));
      }
    }
  }
}

TEST(attention_over_kv_in_int8_agrees_with_its_definition_on_every_integer_isa) {
  for (const std::string& isa : available_integer_isas()) {
    Context other{context.kernels, context.quick, {}, isa};
    for (int threads : {1, 2}) other.executors.push_back(std::make_unique<Executor>(threads));
    for (const Shape& shape : shapes(context.quick)) {
      check_reference<bf16>(other, shape.with_codes(), 40);
      check_reference<float>(other, shape.with_codes(), 70);
    }
  }
}

TEST(attention_has_the_same_bits_for_every_chunking_page_size_and_thread_count) {
  std::vector<Shape> all = shapes(context.quick);
  for (const Shape& shape : all) {
    check_chunks<bf16>(context, shape, context.quick ? 50 : 130);
    check_chunks<float>(context, shape, context.quick ? 50 : 130);
    check_chunks<bf16>(context, shape.with_codes(), context.quick ? 50 : 130);
    check_chunks<float>(context, shape.with_codes(), context.quick ? 50 : 130);
  }
  // More than one span, with and without a window that excludes complete spans.
  if (!context.quick) {
    check_chunks<bf16>(context, all[0], 1100);
    check_chunks<float>(context, {4, 2, 64, 64, 300}, 1100);
    check_chunks<bf16>(context, all[0].with_codes(), 1100);
    check_chunks<float>(context, Shape{4, 2, 64, 64, 300}.with_codes(), 1100);
  }
}

TEST(attention_with_normed_values_or_values_of_keys_agrees_with_double_precision) {
  for (const Shape& plain : {Shape{4, 2, 32, 16, 40, 0, true}, Shape{3, 1, 512, 512, 0, 0, true}}) {
    for (int64_t parts : {1, 2}) {
      const Shape shape = plain.with_normed_values(parts);
      check_reference<bf16>(context, shape, 50);
      check_reference<float>(context, shape, 40);
      check_reference<float>(context, shape.with_codes(), 40);
      check_chunks<bf16>(context, shape, 40);
      check_chunks<float>(context, shape.with_codes(), 40);
    }
  }
}

template <class T>
void check_neighbours(const Context& context, const Shape& shape) {
  const int64_t row_size = shape.heads * shape.size;
  std::vector<Sequence<T>> sequences;
  std::vector<std::vector<T>> alone;
  const int count = context.quick ? 5 : 33;
  for (int i = 0; i < count; i++) {
    sequences.push_back(random_sequence<T>(shape, 3 + (i * 37) % 90, uint64_t(i + 50)));
    Engine<T> engine(context, shape, 16, 8, uint64_t(i));
    alone.push_back(in_chunks(engine, sequences.back(), sequences.back().length, 0));
  }
  // One row is all NaN and infinities; the other rows must not change.
  auto& poisoned = sequences[2].qkv;
  for (size_t i = 0; i < poisoned.size(); i++) set(poisoned[i], i % 2 == 1 ? kNaN : kInf);
  for (size_t threads = 0; threads < 3; threads++) {
    Engine<T> engine(context, shape, 16, count * 7, threads);
    std::vector<typename Engine<T>::Chunk> prompts, last;
    for (int i = 0; i < count; i++) {
      int row = engine.add_row();
      prompts.push_back({row, &sequences[size_t(i)], sequences[size_t(i)].length - 1 - i % 2});
      last.push_back({row, &sequences[size_t(i)], 1 + i % 2});
    }
    engine.step(prompts, threads);
    std::vector<T> out = engine.step(last, threads);
    int64_t at = 0;
    for (int i = 0; i < count; i++) {
      int64_t size = last[size_t(i)].count * row_size;
      const T* expected = alone[size_t(i)].data() + int64_t(alone[size_t(i)].size()) - size;
      if (i == 2) {
        for (int64_t j = 0; j < size; j++) CHECK(!std::isfinite(widen(out[size_t(at + j)])));
      } else {
        CHECK(same_bits(out.data() + at, expected, size));
      }
      at += size;
    }
  }
}

TEST(attention_rows_do_not_depend_on_other_rows_or_poisoned_slots) {
  for (const Shape& shape : shapes(context.quick)) {
    check_neighbours<bf16>(context, shape);
    check_neighbours<float>(context, shape);
    check_neighbours<bf16>(context, shape.with_codes());
    check_neighbours<float>(context, shape.with_codes());
  }
}

// Rows of one to five spans (three if quick), compared with each row alone on one thread, which is not split by
// spans. The batch computes the prompts, then decodes all five rows, then only the longest and the
// shortest: few enough units to be split by spans with more than one thread.
template <class T>
void check_long_rows(const Context& context, const Shape& shape) {
  constexpr int64_t kChunk = 300, kDecoded = 4;
  const std::vector<int64_t> lengths{600, 1100, context.quick ? 1200 : 2100, 40, 5};
  const int64_t width = shape.heads * shape.size;
  std::vector<Sequence<T>> sequences;
  std::vector<std::vector<T>> alone;
  for (int64_t length : lengths) {
    sequences.push_back(random_sequence<T>(shape, length, uint64_t(length)));
    Engine<T> engine(context, shape, 16, length / 16 + 2, uint64_t(length));
    alone.push_back(in_chunks(engine, sequences.back(), kChunk, 0));
  }
  for (size_t threads = 0; threads < context.executors.size(); threads++) {
    Engine<T> engine(context, shape, 16, 260, threads + 3);
    std::vector<int64_t> done(sequences.size(), 0);
    for (size_t i = 0; i < sequences.size(); i++) engine.add_row();
    auto step = [&](std::vector<size_t> rows, int64_t count, int64_t behind) {
      std::vector<typename Engine<T>::Chunk> chunks;
      for (size_t row : rows) {
        int64_t left = sequences[row].length - behind - done[row];
        if (left > 0) chunks.push_back({int(row), &sequences[row], std::min(count, left)});
      }
      std::vector<T> out = engine.step(chunks, threads);
      const T* mine = out.data();
      for (const auto& chunk : chunks) {
        size_t row = size_t(chunk.row);
        CHECK(same_bits(mine, alone[row].data() + done[row] * width, chunk.count * width));
        done[row] += chunk.count;
        mine += chunk.count * width;
      }
      return !chunks.empty();
    };
    while (step({2, 0, 3, 1, 4}, kChunk, kDecoded)) continue;
    for (int i = 0; i < kDecoded / 2; i++) step({0, 1, 2, 3, 4}, 1, 0);
    for (int i = 0; i < kDecoded / 2; i++) step({4, 2}, 1, 0);
  }
}

TEST(attention_of_long_rows_together_has_the_bits_of_each_alone) {
  check_long_rows<bf16>(context, {4, 2, 16, 16});
  check_long_rows<float>(context, {4, 2, 16, 16});
  check_long_rows<bf16>(context, {2, 1, 32, 16, 700, 5.0f});
  check_long_rows<bf16>(context, Shape{4, 2, 16, 16}.with_sinks_and_gate());
  check_long_rows<bf16>(context, Shape{4, 2, 16, 16}.with_codes());
  check_long_rows<float>(context, Shape{2, 1, 32, 16, 700, 5.0f}.with_codes());
  check_long_rows<bf16>(context, Shape{4, 2, 16, 16, 700, 0, true}.with_normed_values(1));
}

// Rows that decode after contexts of 1 to 40 tokens; the output of the last query is compared. A
// poisoned row has poison values in its complete context.
template <class T>
void check_decoding(const Context& context, const Shape& shape, int64_t page_size) {
  const int most = context.quick ? 33 : 513;
  std::vector<Sequence<T>> sequences;
  for (int i = 0; i < most; i++) {
    sequences.push_back(random_sequence<T>(shape, 2 + (i * 37) % 40, uint64_t(i + 900)));
  }
  const int64_t width = shape.heads * shape.size;
  RowOperation op{"rope_append_attend", width * int64_t(sizeof(T)), most, nullptr};
  op.run = [&](const RowBatch& batch) {
    std::vector<Sequence<T>> own;
    for (const RowContent& row : batch.rows) {
      own.push_back(sequences[size_t(row.data)]);
      if (!row.is_poisoned) continue;
      for (T& value : own.back().qkv) set(value, row.poison);
    }
    Engine<T> engine(context, shape, page_size, int64_t(own.size()) * (42 / page_size + 1),
                     own.size());
    std::vector<typename Engine<T>::Chunk> prompts, last;
    for (size_t i = 0; i < own.size(); i++) {
      int row = engine.add_row();
      int64_t queries = 1 + batch.rows[i].data % std::min<int64_t>(3, own[i].length - 1);
      prompts.push_back({row, &own[i], own[i].length - queries});
      last.push_back({row, &own[i], queries});
    }
    engine.step(prompts, batch.threads);
    std::vector<T> out = engine.step(last, batch.threads), ends;
    int64_t at = 0;
    for (const auto& chunk : last) {
      at += chunk.count * width;
      ends.insert(ends.end(), out.begin() + at - width, out.begin() + at);
    }
    return bytes_of(ends);
  };
  check_exact(context, op);
}

TEST(a_decoding_row_does_not_depend_on_its_batch) {
  for (const Shape& shape : {Shape{4, 2, 16, 16}, Shape{3, 1, 48, 32, 20, 5.0f, true, true}}) {
    check_decoding<bf16>(context, shape, 16);
    check_decoding<float>(context, shape, 32);
    check_decoding<bf16>(context, shape.with_codes(), 32);
    check_decoding<float>(context, shape.with_codes(), 16);
  }
}

// The codes and the scale of a vector, by the rules of core/kv_codes.h.
struct CodedVector {
  std::vector<int8_t> codes;
  float scale = 0;

  explicit CodedVector(const float* x, int64_t size) : codes(size_t(size), 0) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < size; i++) {
      is_finite &= std::isfinite(x[i]);
      largest = std::max(largest, std::abs(x[i]));
    }
    if (!is_finite) scale = kNaN;
    if (!is_finite || largest < 0x1p-64f) return;
    scale = largest / 127;
    const float inverse = 127 / largest;
    for (int64_t i = 0; i < size; i++) codes[size_t(i)] = int8_t(std::nearbyint(x[i] * inverse));
  }
};

// Appends one token of plain f32 keys and values, and compares the bytes of both pools.
TEST(appended_codes_and_scales_are_those_of_the_definition) {
  const Shape shape = Shape{2, 1, 48, 0}.with_codes();
  const int64_t size = shape.size, lane = 5, begin = shape.heads * size;
  for (float factor : {1.0f, 3e38f, 0x1p-60f, 0x1p-66f, 0.0f, kInf, kNaN}) {
    Sequence<float> sequence = random_sequence<float>(shape, 6, 8);
    for (int64_t i = 0; i < 2 * size; i++) {
      float& x = sequence.qkv[size_t(lane * shape.width() + begin + i)];
      x = factor == factor && std::abs(factor) > 1 ? std::tanh(x) * factor : x * factor;
    }
    Engine<float> engine(context, shape, 16, 1, 1);
    in_chunks(engine, sequence, 6, 0);
    for (bool is_key : {true, false}) {
      const float* x = sequence.qkv.data() + lane * shape.width() + begin + (is_key ? 0 : size);
      const CodedVector expected(x, size);
      const uint8_t* block = is_key ? engine.keys() : engine.values();
      for (int64_t i = 0; i < size; i++) {
        int64_t key_at = (i / 4 * kLanes + lane) * 4 + i % 4;
        int64_t value_at = (lane / 4 * size + i) * 4 + lane % 4;
        int code = is_key ? block[key_at] - 128 : int8_t(block[value_at]);
        CHECK(code == expected.codes[size_t(i)]);
      }
      float scale;
      std::memcpy(&scale, block + kLanes * size + lane * 4, sizeof(scale));
      CHECK(std::isnan(expected.scale) ? std::isnan(scale) : scale == expected.scale);
    }
  }
}

// A later token of the same row must not affect an earlier query, not even as 0 × NaN.
void check_later_tokens(const Context& context, const Shape& shape) {
  Sequence<bf16> sequence = random_sequence<bf16>(shape, 20, 3), bad = sequence;
  for (int64_t i = 11 * shape.width(); i < 12 * shape.width(); i++) set(bad.qkv[size_t(i)], kNaN);
  Engine<bf16> clean(context, shape, 16, 4, 1), poisoned(context, shape, 16, 4, 1);
  auto expected = in_chunks(clean, sequence, 20, 0), out = in_chunks(poisoned, bad, 20, 0);
  CHECK(same_bits(out.data(), expected.data(), 11 * shape.heads * shape.size));
  CHECK(std::isnan(widen(out[size_t(11 * shape.heads * shape.size)])));
}

TEST(attention_queries_do_not_depend_on_later_tokens_of_their_row) {
  check_later_tokens(context, {4, 2, 64, 64});
  check_later_tokens(context, Shape{4, 2, 64, 64}.with_codes());
}

// Negative control: with spans relative to the query, the sums would depend on the chunking.
TEST(softmax_spans_at_relative_positions_are_detected) {
  Random random(2);
  std::vector<float> p = random_values<float>(random, 600);
  auto merged = [&](size_t boundary) {
    float sum[2] = {0, 0};
    for (size_t i = 0; i < p.size(); i++) sum[i >= boundary] += std::exp(p[i]);
    return sum[0] + sum[1];
  };
  float absolute = merged(512), relative = merged(600 - 512);
  CHECK(!same_bits(&absolute, &relative, 1));
}

}  // namespace
}  // namespace cadenza::tests
