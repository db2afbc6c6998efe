// Checks that each row of an operation's result is bitwise independent of its batch.
//
// An operation is run on batches of rows, each identified by its content. A row's bytes must equal
// those of the row in a batch of one, for every batch size, index in the batch and thread count,
// and next to poisoned rows. The first difference is returned as text, so negative controls can
// require one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {

// A row of a batch: the index of its data, or `poison` in all of its elements.
struct RowContent {
  int data;
  bool is_poisoned = false;
  float poison = 0;
};

struct RowBatch {
  size_t threads;  // index of the executor: number of threads - 1
  std::vector<RowContent> rows;
};

struct RowOperation {
  std::string name;
  int64_t row_bytes;
  int most_rows = 513;
  std::function<std::vector<uint8_t>(const RowBatch&)> run;  // [rows, row_bytes]
};

constexpr float kPoisons[] = {kNaN, kInf, -kInf, 3e38f, -3e38f, 1e-40f};

inline std::vector<int> batch_sizes(bool quick, int most) {
  std::vector<int> sizes, all{1, 2, 3, 5, 7, 12, 14, 15, 29, 33, 65};
  if (!quick) {
    all.clear();
    for (int n = 1; n <= 40; n++) all.push_back(n);
    for (int n : {63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513}) all.push_back(n);
  }
  for (int n : all) {
    if (n <= most) sizes.push_back(n);
  }
  return sizes;
}

inline std::vector<RowContent> clean_rows(int first, int count) {
  std::vector<RowContent> rows;
  for (int row = first; row < first + count; row++) rows.push_back({row});
  return rows;
}

// Compares each row that is not poisoned with `alone`, the results of batches of one. Returns a
// description of the first row that differs, or an empty string.
inline std::string differs_from_alone(const RowOperation& op, const RowBatch& batch,
                                      const std::vector<uint8_t>& alone) {
  std::vector<uint8_t> out = op.run(batch);
  for (size_t i = 0; i < batch.rows.size(); i++) {
    const RowContent& row = batch.rows[i];
    if (row.is_poisoned) continue;
    const uint8_t* expected = alone.data() + row.data * op.row_bytes;
    if (same_bits(out.data() + int64_t(i) * op.row_bytes, expected, op.row_bytes)) continue;
    return op.name + ": row " + std::to_string(row.data) + " at index " + std::to_string(i) +
           " of " + std::to_string(batch.rows.size()) + ", " + std::to_string(batch.threads + 1) +
           " threads";
  }
  return "";
}

inline std::string find_batch_difference(const Context& context, const RowOperation& op,
                                         const std::vector<uint8_t>& alone) {
  for (int count : batch_sizes(context.quick, op.most_rows)) {
    for (size_t threads = 0; threads < context.executors.size(); threads++) {
      for (int first : {0, (op.most_rows - count) / 2, op.most_rows - count}) {
        std::string found = differs_from_alone(op, {threads, clean_rows(first, count)}, alone);
        if (!found.empty()) return found;
      }
    }
  }
  return "";
}

inline std::string find_poison_difference(const Context& context, const RowOperation& op,
                               const std::vector<uint8_t>& alone) {
  for (int count :
       context.quick ? std::vector<int>{2, 15, 33} : std::vector<int>{2, 7, 15, 30, 65}) {
    if (count > op.most_rows) continue;
    for (float poison : kPoisons) {
      for (int at : {0, count / 2, count - 1}) {
        RowBatch batch{context.executors.size() - 1, clean_rows(0, count)};
        batch.rows[size_t(at)].is_poisoned = true;
        batch.rows[size_t(at)].poison = poison;
        std::string found = differs_from_alone(op, batch, alone);
        if (!found.empty()) return found + ", in a batch with a row of " + std::to_string(poison);
      }
    }
  }
  return "";
}

// Describes the first dependence of a row on its batch, or returns an empty string.
inline std::string find_inexactness(const Context& context, const RowOperation& op) {
  std::vector<uint8_t> alone;
  for (int row = 0; row < op.most_rows; row++) {
    std::vector<uint8_t> one = op.run({0, {{row}}});
    CHECK(int64_t(one.size()) == op.row_bytes);
    alone.insert(alone.end(), one.begin(), one.end());
  }
  std::string found = find_batch_difference(context, op, alone);
  return found.empty() ? find_poison_difference(context, op, alone) : found;
}

inline void check_exact(const Context& context, const RowOperation& op) {
  std::string found = find_inexactness(context, op);
  if (!found.empty()) fail(__FILE__, __LINE__, found);
}

// The batch's rows of `values` [*, width], poisoned as specified.
template <class T>
std::vector<T> take_rows(const RowBatch& batch, const std::vector<T>& values, int64_t width) {
  std::vector<T> taken;
  for (const RowContent& row : batch.rows) {
    auto from = values.begin() + row.data * width;
    taken.insert(taken.end(), from, from + width);
    if (!row.is_poisoned) continue;
    for (int64_t i = 1; i <= width; i++) set(taken[taken.size() - size_t(i)], row.poison);
  }
  return taken;
}

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace cadenza::tests
