// A paged KV pool that runs attention steps, for the tests of attention.
#pragma once

#include <algorithm>
#include <functional>

#include "core/kv_codes.h"
#include "tests/exactness.h"

namespace cadenza::tests {

struct Shape {
  int64_t heads, kv_heads, size, rotary;
  int64_t window = 0;
  float soft_cap = 0;
  bool has_norm = false;
  bool norm_spans_heads = false;
  KvFormat kv_format = KvFormat::kActivations;
  bool has_sinks = false;
  bool has_gate = false;
  int64_t kv_parts = 2;
  bool norms_values = false;
  bool reads_again = false;  // each step is run again with queries alone
  int64_t width() const { return (heads + kv_parts * kv_heads) * size; }
  // The same with normed values, which are made of keys if `parts` is 1.
  Shape with_normed_values(int64_t parts) const {
    Shape shape = *this;
    shape.kv_parts = parts;
    shape.norms_values = shape.reads_again = true;
    return shape;
  }
  // The same with a sink for each head, and an output gate, which is the query as it is projected.
  Shape with_sinks_and_gate() const {
    Shape shape = *this;
    shape.has_sinks = shape.has_gate = true;
    return shape;
  }
  // The same over KV in int8.
  Shape with_codes() const {
    Shape shape = *this;
    shape.kv_format = KvFormat::kInt8;
    return shape;
  }
};

// The qkv of one sequence at every position.
template <class T>
struct Sequence {
  int64_t length;
  std::vector<T> qkv;
};

constexpr int64_t kRopeRows = 2112;

inline std::vector<float> rope_table(int64_t rotary) {
  std::vector<float> table(size_t(kRopeRows * rotary));
  for (int64_t p = 0; p < kRopeRows; p++) {
    for (int64_t i = 0; i < rotary / 2; i++) {
      double angle = double(p) / std::pow(1e4, 2.0 * double(i) / double(rotary));
      table[size_t(p * rotary + i)] = float(std::cos(angle));
      table[size_t(p * rotary + rotary / 2 + i)] = float(std::sin(angle));
    }
  }
  return table;
}

// A paged KV pool that runs attention steps for its rows.
template <class T>
class Engine {
 public:
  Engine(const Context& context, Shape shape, int64_t page_size, int64_t num_pages, uint64_t seed)
      : context_(context),
        shape_(shape),
        page_size_(page_size),
        num_pages_(num_pages),
        rope_(rope_table(shape.rotary)),
        pool_bytes_(num_pages * page_size * shape.kv_heads * token_bytes()),
        keys_(pool_bytes_),
        values_(pool_bytes_) {
    // Every slot starts as NaN (0xff bytes), so reading a slot that the row does not own is
    // detected.
    Random random(seed);
    for (int32_t p = 0; p < num_pages; p++) free_.push_back(p);
    for (size_t i = free_.size(); i > 1; i--)
      std::swap(free_[i - 1], free_[size_t(random.below(int(i)))]);
    Random weights(5);
    q_weight_ = random_values<float>(weights, shape.size * shape.heads);
    k_weight_ = random_values<float>(weights, shape.size * shape.kv_heads);
    sinks_ = random_values<float>(weights, shape.heads, 2);
  }

  int add_row() {
    pages_.emplace_back();
    lengths_.push_back(0);
    return int(pages_.size()) - 1;
  }

  struct Chunk {
    int row;
    const Sequence<T>* sequence;
    int64_t count;
  };

  // Runs one step; returns the outputs of all chunks' queries, concatenated.
  std::vector<T> step(const std::vector<Chunk>& chunks, size_t threads = 0) {
    std::vector<T> qkv;
    std::vector<int32_t> positions, slots, starts{0}, lens, table;
    int64_t most = 1;
    for (const Chunk& chunk : chunks) {
      grow(chunk.row, lengths_[size_t(chunk.row)] + chunk.count);
      most = std::max(most, int64_t(pages_[size_t(chunk.row)].size()));
    }
    for (const Chunk& chunk : chunks) {
      int64_t& length = lengths_[size_t(chunk.row)];
      const auto& pages = pages_[size_t(chunk.row)];
      const T* from = chunk.sequence->qkv.data() + length * shape_.width();
      qkv.insert(qkv.end(), from, from + chunk.count * shape_.width());
      for (int64_t p = length; p < length + chunk.count; p++) {
        positions.push_back(int32_t(p));
        slots.push_back(int32_t(pages[size_t(p / page_size_)] * page_size_ + p % page_size_));
      }
      length += chunk.count;
      starts.push_back(int32_t(positions.size()));
      lens.push_back(int32_t(length));
      table.insert(table.end(), pages.begin(), pages.end());
      table.insert(table.end(), size_t(most) - pages.size(), -1);
    }
    std::vector<T> out(positions.size() * size_t(shape_.heads * shape_.size));
    AttendTask task{};
    task.rows = int64_t(chunks.size());
    task.num_tokens = int64_t(positions.size());
    task.pages_per_row = most;
    task.page_size = page_size_;
    task.num_pages = num_pages_;
    task.heads = shape_.heads;
    task.kv_heads = shape_.kv_heads;
    task.head_size = task.value_size = shape_.size;
    task.rotary_size = shape_.rotary;
    task.rope_rows = kRopeRows;
    task.scale = 1 / std::sqrt(float(shape_.size));
    task.soft_cap = shape_.soft_cap;
    task.window = shape_.window;
    task.qkv = qkv.data();
    task.positions = task.rope_positions = positions.data();
    task.slot_mapping = slots.data();
    task.query_starts = starts.data();
    task.kv_lens = lens.data();
    task.page_table = table.data();
    task.rope = rope_.data();
    if (shape_.has_norm) task.q_weight = q_weight_.data(), task.k_weight = k_weight_.data();
    task.norm_eps = 1e-6f;
    task.norm_spans_heads = shape_.norm_spans_heads;
    task.kv_format = shape_.kv_format;
    std::vector<T> gate;
    for (size_t i = 0; i < positions.size(); i++) {
      const T* from = qkv.data() + int64_t(i) * shape_.width();
      gate.insert(gate.end(), from, from + shape_.heads * shape_.size);
    }
    if (shape_.has_sinks) task.sinks = sinks_.data();
    if (shape_.has_gate) task.gate = gate.data();
    task.k_pool = keys_.data();
    task.v_pool = values_.data();
    task.out = out.data();
    task.kv_parts = shape_.kv_parts;
    task.norms_values = shape_.norms_values;
    rope_append_attend(context_.runtime(threads), dtype_of<T>(), task);
    if (shape_.reads_again) check_queries_alone(task, threads);
    if (after_step) after_step(task);
    return out;
  }

  // Called with each step's task, once it has run.
  std::function<void(const AttendTask&)> after_step;

  // Queries without keys give the same, and leave the pools as they are.
  void check_queries_alone(AttendTask task, size_t threads) {
    const int64_t width = shape_.heads * shape_.size;
    const std::vector<uint8_t> old_keys(keys(), keys() + pool_bytes_);
    const std::vector<uint8_t> old_values(values(), values() + pool_bytes_);
    std::vector<T> queries, out(size_t(task.num_tokens * width));
    for (int64_t i = 0; i < task.num_tokens; i++) {
      const T* from = static_cast<const T*>(task.qkv) + i * shape_.width();
      queries.insert(queries.end(), from, from + width);
    }
    const T* expected = static_cast<const T*>(task.out);
    task.qkv = queries.data();
    task.kv_parts = 0;
    task.out = out.data();
    rope_append_attend(context_.runtime(threads), dtype_of<T>(), task);
    CHECK(same_bits(out.data(), expected, task.num_tokens * width));
    CHECK(std::equal(old_keys.begin(), old_keys.end(), keys()));
    CHECK(std::equal(old_values.begin(), old_values.end(), values()));
  }

  const uint8_t* keys() { return static_cast<const uint8_t*>(keys_.data()); }
  const uint8_t* values() { return static_cast<const uint8_t*>(values_.data()); }
  const std::vector<float>& rope() const { return rope_; }
  const std::vector<float>& q_weight() const { return q_weight_; }
  const std::vector<float>& k_weight() const { return k_weight_; }
  const std::vector<float>& sinks() const { return sinks_; }

 private:
  bool has_codes() const { return shape_.kv_format == KvFormat::kInt8; }
  int64_t token_bytes() const {
    return has_codes() ? kv_code_bytes(shape_.size) : shape_.size * int64_t(sizeof(T));
  }
  void grow(int row, int64_t length) {
    auto& pages = pages_[size_t(row)];
    while (int64_t(pages.size()) * page_size_ < length) {
      CHECK(!free_.empty());
      pages.push_back(free_.back());
      free_.pop_back();
    }
  }

  const Context& context_;
  Shape shape_;
  int64_t page_size_, num_pages_;
  std::vector<float> rope_, q_weight_, k_weight_, sinks_;
  int64_t pool_bytes_;
  Aligned keys_, values_;
  std::vector<int32_t> free_;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<int64_t> lengths_;
};

template <class T>
Sequence<T> random_sequence(const Shape& shape, int64_t length, uint64_t seed) {
  Random random(seed);
  return {length, random_values<T>(random, length * shape.width())};
}

// Runs a sequence in chunks of the given size; returns the outputs of all positions.
template <class T>
std::vector<T> in_chunks(Engine<T>& engine, const Sequence<T>& sequence, int64_t chunk,
                         size_t threads) {
  int row = engine.add_row();
  std::vector<T> all;
  for (int64_t done = 0; done < sequence.length; done += chunk) {
    auto out = engine.step({{row, &sequence, std::min(chunk, sequence.length - done)}}, threads);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

}  // namespace cadenza::tests
