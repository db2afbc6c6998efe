// Attention over latents, and the products with a weight for each head.
#include <cmath>
#include <cstring>

#include "tests/attention.h"
#include "tests/check.h"

namespace cadenza::tests {
namespace {

struct LatentShape {
  int64_t heads, rank, rotary, query_size;
  bool pairs_neighbours = true;
  int64_t key_size() const { return rank + rotary; }
};

// What one sequence gives at every position.
template <class T>
struct LatentSequence {
  int64_t length;
  std::vector<T> absorbed, queries;  // [length, heads, rank], [length, heads, query_size]
  std::vector<float> keys;           // [length, rank + rotary]
};

template <class T>
LatentSequence<T> random_latents(const LatentShape& shape, int64_t length, uint64_t seed) {
  Random random(seed);
  return {length, random_values<T>(random, length * shape.heads * shape.rank),
          random_values<T>(random, length * shape.heads * shape.query_size),
          random_values<float>(random, length * shape.key_size(), 2)};
}

// A pool of latents that runs steps. Row r has the pages r, r + rows, r + 2 rows, …
template <class T>
class LatentEngine {
 public:
  LatentEngine(const Context& context, LatentShape shape, int64_t page_size, int64_t rows,
               int64_t most_tokens)
      : context_(context),
        shape_(shape),
        page_size_(page_size),
        rows_(rows),
        pages_per_row_(ceil_div(most_tokens, page_size)),
        rope_(rope_table(shape.rotary)),
        pool_(rows * pages_per_row_ * page_size * shape.key_size() * int64_t(sizeof(T))),
        lengths_(size_t(rows), 0) {
    Random random(6);
    norm_ = random_values<float>(random, shape.rank);
  }

  struct Chunk {
    int row;
    const LatentSequence<T>* sequence;
    int64_t count;
  };

  // The outputs [tokens, heads, rank] of all chunks' queries, concatenated.
  std::vector<T> step(const std::vector<Chunk>& chunks, size_t threads = 0) {
    std::vector<T> absorbed, queries;
    std::vector<float> keys;
    std::vector<int32_t> positions, slots, starts{0}, lens, table;
    for (const Chunk& chunk : chunks) {
      int64_t& length = lengths_[size_t(chunk.row)];
      append(absorbed, chunk.sequence->absorbed, length, chunk.count, shape_.heads * shape_.rank);
      append(queries, chunk.sequence->queries, length, chunk.count,
             shape_.heads * shape_.query_size);
      append(keys, chunk.sequence->keys, length, chunk.count, shape_.key_size());
      for (int64_t p = length; p < length + chunk.count; p++) {
        int64_t page = p / page_size_ * rows_ + chunk.row;
        positions.push_back(int32_t(p));
        slots.push_back(int32_t(page * page_size_ + p % page_size_));
      }
      length += chunk.count;
      starts.push_back(int32_t(positions.size()));
      lens.push_back(int32_t(length));
      for (int64_t i = 0; i < pages_per_row_; i++) table.push_back(int32_t(i * rows_ + chunk.row));
    }
    std::vector<T> out(positions.size() * size_t(shape_.heads * shape_.rank));
    AttendTask task{};
    task.rows = int64_t(chunks.size());
    task.num_tokens = int64_t(positions.size());
    task.pages_per_row = pages_per_row_;
    task.page_size = page_size_;
    task.num_pages = rows_ * pages_per_row_;
    task.heads = shape_.heads;
    task.kv_heads = 1;
    task.head_size = shape_.key_size();
    task.value_size = shape_.rank;
    task.rotary_size = shape_.rotary;
    task.rope_rows = kRopeRows;
    task.scale = scale();
    task.latent = {absorbed.data(), queries.data(), keys.data(), shape_.query_size,
                   shape_.pairs_neighbours};
    task.positions = task.rope_positions = positions.data();
    task.slot_mapping = slots.data();
    task.query_starts = starts.data();
    task.kv_lens = lens.data();
    task.page_table = table.data();
    task.rope = rope_.data();
    task.k_weight = norm_.data();
    task.norm_eps = 1e-6f;
    task.k_pool = pool_.data();
    task.out = out.data();
    rope_append_attend(context_.runtime(threads), dtype_of<T>(), task);
    return out;
  }

  float scale() const { return 1 / std::sqrt(float(shape_.key_size())); }
  const std::vector<float>& rope() const { return rope_; }
  const std::vector<float>& norm() const { return norm_; }

 private:
  template <class V>
  static void append(std::vector<V>& to, const std::vector<V>& from, int64_t begin, int64_t count,
                     int64_t width) {
    to.insert(to.end(), from.begin() + begin * width, from.begin() + (begin + count) * width);
  }

  const Context& context_;
  LatentShape shape_;
  int64_t page_size_, rows_, pages_per_row_;
  std::vector<float> rope_, norm_;
  Aligned pool_;
  std::vector<int64_t> lengths_;
};

template <class T>
std::vector<T> latents_in_chunks(LatentEngine<T>& engine, const LatentSequence<T>& sequence,
                                 int64_t chunk, size_t threads) {
  std::vector<T> all;
  for (int64_t done = 0; done < sequence.length; done += chunk) {
    auto out = engine.step({{0, &sequence, std::min(chunk, sequence.length - done)}}, threads);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

// Rounded to T.
template <class T>
double rounded(double x) {
  T held;
  set(held, float(x));
  return widen(held);
}

// A part of a head behind its rotation, in double precision.
template <class T, class V>
std::vector<double> rotated(const LatentShape& shape, const std::vector<float>& rope,
                            int64_t position, const V* part) {
  const int64_t half = shape.rotary / 2;
  std::vector<double> out(static_cast<size_t>(shape.rotary));
  for (int64_t i = 0; i < half; i++) {
    const bool pairs = shape.pairs_neighbours;
    double a = widen(part[pairs ? 2 * i : i]), b = widen(part[pairs ? 2 * i + 1 : i + half]);
    double c = rope[size_t(position * shape.rotary + i)];
    double s = rope[size_t(position * shape.rotary + half + i)];
    out[size_t(i)] = rounded<T>(a * c - b * s);
    out[size_t(i + half)] = rounded<T>(b * c + a * s);
  }
  return out;
}

template <class T>
std::vector<double> key_at(const LatentShape& shape, const LatentEngine<T>& engine,
                           const LatentSequence<T>& sequence, int64_t position) {
  const float* raw = sequence.keys.data() + position * shape.key_size();
  double squares = 0;
  for (int64_t i = 0; i < shape.rank; i++) squares += double(raw[i]) * raw[i];
  const double inverse = 1 / std::sqrt(squares / double(shape.rank) + 1e-6);
  std::vector<double> key;
  for (int64_t i = 0; i < shape.rank; i++) {
    key.push_back(rounded<T>(raw[i] * inverse * engine.norm()[size_t(i)]));
  }
  auto end = rotated<T>(shape, engine.rope(), position, raw + shape.rank);
  key.insert(key.end(), end.begin(), end.end());
  return key;
}

template <class T>
void check_values(const Context& context, const LatentShape& shape, int64_t length) {
  auto sequence = random_latents<T>(shape, length, 71);
  LatentEngine<T> engine(context, shape, 32, 1, length);
  const std::vector<T> out = latents_in_chunks(engine, sequence, 100, 1);
  std::vector<std::vector<double>> keys;
  for (int64_t p = 0; p < length; p++) keys.push_back(key_at(shape, engine, sequence, p));
  for (int64_t p : {int64_t(0), int64_t(17), length - 1}) {
    for (int64_t h = 0; h < shape.heads; h++) {
      const int64_t place = p * shape.heads + h;
      std::vector<double> query, weights, expected(static_cast<size_t>(shape.rank), 0.0);
      for (int64_t i = 0; i < shape.rank; i++) {
        query.push_back(widen(sequence.absorbed[size_t(place * shape.rank + i)]));
      }
      const T* part = sequence.queries.data() + (place + 1) * shape.query_size - shape.rotary;
      auto end = rotated<T>(shape, engine.rope(), p, part);
      query.insert(query.end(), end.begin(), end.end());
      double total = 0;
      for (int64_t t = 0; t <= p; t++) {
        double dot = 0;
        for (size_t i = 0; i < query.size(); i++) dot += query[i] * keys[size_t(t)][i];
        weights.push_back(std::exp(dot * engine.scale()));
        total += weights.back();
      }
      for (int64_t t = 0; t <= p; t++) {
        for (size_t i = 0; i < expected.size(); i++) {
          expected[i] += weights[size_t(t)] / total * keys[size_t(t)][i];
        }
      }
      for (size_t i = 0; i < expected.size(); i++) {
        CHECK_NEAR(widen(out[size_t(place * shape.rank) + i]), expected[i],
                   (kStep<T> == 2 ? 0.03 : 2e-5));
      }
    }
  }
}

TEST(attention_over_latents_agrees_with_double_precision) {
  for (const LatentShape& shape :
       {LatentShape{3, 48, 16, 24}, LatentShape{20, 512, 64, 256}, LatentShape{5, 32, 32, 40, false}}) {
    check_values<bf16>(context, shape, context.quick ? 90 : 600);
    check_values<float>(context, shape, context.quick ? 90 : 600);
  }
}

// The same bits for every chunking, page size, number of threads, and beside other rows.
template <class T>
void check_schedules(const Context& context, const LatentShape& shape, int64_t length) {
  auto sequence = random_latents<T>(shape, length, 72), other = random_latents<T>(shape, length, 73);
  LatentEngine<T> whole(context, shape, 16, 1, length);
  const std::vector<T> expected = latents_in_chunks(whole, sequence, length, 0);
  const int64_t size = int64_t(expected.size());
  for (int64_t chunk : {int64_t(1), int64_t(7), int64_t(100)}) {
    for (size_t threads : {size_t(0), size_t(1), size_t(2)}) {
      LatentEngine<T> engine(context, shape, chunk == 7 ? 64 : 16, 1, length);
      const auto out = latents_in_chunks(engine, sequence, chunk, threads);
      CHECK(same_bits(out.data(), expected.data(), size));
    }
  }
  LatentEngine<T> beside(context, shape, 32, 3, length);
  const int64_t width = shape.heads * shape.rank;
  for (T& value : other.absorbed) set(value, kNaN);
  for (int64_t done = 0; done < length; done += 50) {
    const int64_t count = std::min<int64_t>(50, length - done);
    auto out = beside.step({{1, &other, count}, {0, &sequence, count}, {2, &other, count}}, 2);
    CHECK(same_bits(out.data() + count * width, expected.data() + done * width, count * width));
  }
}

TEST(attention_over_latents_has_the_same_bits_in_every_schedule) {
  for (const LatentShape& shape : {LatentShape{3, 48, 16, 24}, LatentShape{20, 64, 32, 40}}) {
    check_schedules<bf16>(context, shape, context.quick ? 150 : 1100);
    check_schedules<float>(context, shape, context.quick ? 530 : 1100);
  }
}

TEST(latents_of_later_tokens_do_not_reach_a_query) {
  const LatentShape shape{3, 48, 16, 24};
  auto sequence = random_latents<bf16>(shape, 20, 3), bad = sequence;
  for (int64_t i = 11 * shape.key_size(); i < 12 * shape.key_size(); i++) bad.keys[size_t(i)] = kNaN;
  LatentEngine<bf16> clean(context, shape, 16, 1, 20), poisoned(context, shape, 16, 1, 20);
  auto expected = latents_in_chunks(clean, sequence, 20, 0);
  auto out = latents_in_chunks(poisoned, bad, 20, 0);
  const int64_t width = shape.heads * shape.rank;
  CHECK(same_bits(out.data(), expected.data(), 11 * width));
  CHECK(std::isnan(widen(out[size_t(11 * width)])));
}

// Each head's product equals the dense product with its weight, bit for bit.
template <class T>
void check_heads(const Context& context, int64_t rows) {
  const int64_t heads = 3, n = 50, k = 45, stride = 61;
  Random random(38);
  const int64_t bytes = ceil_div(n, kPanel) * panel_bytes(format_of(dtype_of<T>()), k);
  Aligned packed(heads * bytes);
  char* weights = static_cast<char*>(packed.data());
  std::vector<T> x = random_values<T>(random, rows * heads * stride);
  std::vector<T> out(size_t(rows * heads * n)), dense(size_t(rows * n)), own;
  for (int64_t h = 0; h < heads; h++) {
    std::vector<float> w = random_values<float>(random, n * k);
    pack(*context.executors[0],
         {{{w.data(), DType::kF32, n, k}}, k, weights + h * bytes, dtype_of<T>(), false});
  }
  head_linear(context.runtime(2), dtype_of<T>(),
              {rows, heads, n, k, stride, x.data(), weights, out.data()});
  for (int64_t h = 0; h < heads; h++) {
    own.clear();
    for (int64_t row = 0; row < rows; row++) {
      const T* from = x.data() + (row * heads + h) * stride;
      own.insert(own.end(), from, from + k);
    }
    LinearTask task{rows, n, k, own.data(), weights + h * bytes, nullptr, nullptr, dense.data(), false};
    linear(context.runtime(0), dtype_of<T>(), task);
    for (int64_t row = 0; row < rows; row++) {
      CHECK(same_bits(out.data() + (row * heads + h) * n, dense.data() + row * n, n));
    }
  }
}

TEST(a_heads_product_equals_the_dense_product_bitwise) {
  for (int64_t rows : {1, 2, 31, 200}) {
    check_heads<bf16>(context, rows);
    check_heads<float>(context, rows);
  }
}

}  // namespace
}  // namespace cadenza::tests
