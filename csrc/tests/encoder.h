// The memory of an image's rows in one layer, for the tests of image towers.
#pragma once

#include <algorithm>

#include "core/encoder_tasks.h"
#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {

// Projections of an image's rows, and the cosines and sines of their turns: all are made of integers and exactly rounded
// operations.
template <class T>
struct EncodedImage {
  int64_t heads, size, rows;
  int64_t rotary = size / 2;
  std::vector<T> qkv;                      // [rows, 3, heads, size]
  std::vector<float> turns;                // [rows, rotary]
  std::vector<float> query_norm, key_norm;  // [size]

  EncodedImage(int64_t heads_, int64_t size_, int64_t rows_) : heads(heads_), size(size_), rows(rows_) {
    Random random(uint64_t(7 * size + rows));
    qkv = random_values<T>(random, rows * 3 * heads * size);
    query_norm = random_values<float>(random, size);
    key_norm = random_values<float>(random, size);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t i = 0; i < rotary; i++) {
        const double t = double(row * (i % (rotary / 2) + 1) % 97) / 40.0;
        turns.push_back(float((i < rotary / 2 ? 1 - t * t : 2 * t) / (1 + t * t)));
      }
    }
  }
  int64_t width() const { return heads * size; }
};

// Every byte that nothing wrote is a part of a NaN.
template <class T>
class EncoderMemory {
 public:
  EncoderMemory(const EncodedImage<T>& image, int64_t rows)
      : image_(image),
        queries_(bytes(rows, image.size)),
        keys_(bytes(rows, image.size)),
        values_(bytes(rows, round_up(image.size, kLanes))),
        kept_{image.heads, image.size, rows, queries_.data(), keys_.data(), values_.data()} {}

  // Keeps the rows of a block.
  void keep(const Runtime& runtime, int64_t start, int64_t rows) {
    KeepHeadsTask task{};
    task.kept = kept_;
    task.rows = rows, task.start = start;
    task.qkv = image_.qkv.data() + start * 3 * image_.width();
    task.rotary_size = image_.rotary;
    task.turns = image_.turns.data() + start * image_.rotary;
    task.q_weight = image_.query_norm.data(), task.k_weight = image_.key_norm.data();
    task.norms_values = true;
    task.norm_eps = 1e-6f;
    keep_heads(runtime, dtype_of<T>(), task);
  }
  void keep_all(const Runtime& runtime) { keep(runtime, 0, image_.rows); }

  // The results of a block of queries [rows, width].
  std::vector<T> attend(const Runtime& runtime, int64_t start, int64_t rows,
                        const int32_t* bounds = nullptr) {
    std::vector<T> out(size_t(rows * image_.width()));
    EncodeTask task{kept_, rows, start, image_.rows, bounds, 0.25f, out.data()};
    encode_attend(runtime, dtype_of<T>(), task);
    return out;
  }

  float query(int64_t head, int64_t row, int64_t i) const {
    return widen(static_cast<const T*>(kept_.queries)[(head * kept_.rows + row) * image_.size + i]);
  }
  float key(int64_t head, int64_t row, int64_t i) const {
    const int64_t block = (head * kept_.rows + row / kLanes * kLanes) * image_.size, step = kStep<T>;
    const int64_t at = (i / step * kLanes + row % kLanes) * step + i % step;
    return widen(static_cast<const T*>(kept_.keys)[block + at]);
  }
  float value(int64_t head, int64_t row, int64_t i) const {
    const int64_t columns = kept_.value_columns(), step = kStep<T>, lane = row % kLanes;
    const int64_t block = (head * kept_.rows + row / kLanes * kLanes) * columns;
    return widen(static_cast<const T*>(kept_.values)[block + (lane / step * columns + i) * step + lane % step]);
  }

 private:
  int64_t bytes(int64_t rows, int64_t columns) const {
    return image_.heads * rows * columns * int64_t(sizeof(T));
  }

  const EncodedImage<T>& image_;
  Aligned queries_, keys_, values_;
  EncoderHeads kept_;
};

}  // namespace cadenza::tests
