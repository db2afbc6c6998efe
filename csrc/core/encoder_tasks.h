// The arguments of the operations of image towers, as plain data like core/tasks.h.
//
// N rows of the memory of an image, H heads, D head size, E width, S image slots. Rows lie in blocks of sixteen.
#pragma once

#include "core/types.h"

namespace cadenza {

// Numbers as the words of a program have them.
enum class EncoderActivation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kQuickGelu = 3 };
constexpr int kNumEncoderActivations = 4;

struct LayerNormTask {
  int64_t rows, width;
  const float* x;       // [rows, width]
  const float* weight;  // [width]
  const float* bias;    // [width], or null
  float eps;
  void* out;  // activation dtype [rows, width]
};

struct ActivateTask {
  int64_t rows, width;
  const void* x;  // activation dtype [rows, width]
  EncoderActivation activation;
  void* out;  // activation dtype [rows, width]; may alias x
};

// Queries, keys and values of an image's rows in one layer, in the activation dtype. Queries are [H, N,
// D]; keys, for each head and block of rows, [D / step][16][step]; values [16 / step][value_columns()][step].
struct EncoderHeads {
  int64_t heads, head_size, rows;  // rows: a multiple of kLanes
  void* queries;
  void* keys;
  void* values;

  int64_t value_columns() const { return round_up(head_size, kLanes); }
  int64_t width() const { return heads * head_size; }
};

struct KeepHeadsTask {
  EncoderHeads kept;
  int64_t rows, start;  // of the block
  const void* qkv;      // activation dtype [rows, 3, H, D]: queries, keys, values
  int64_t rotary_size;
  const float* turns;    // [rows, rotary_size]: cosines, then sines; or null
  const float* q_weight;  // [D]: an RMS norm of each head; or null
  const float* k_weight;
  bool norms_values;  // each head, without a weight
  float norm_eps;
};

struct EncodeTask {
  EncoderHeads kept;
  int64_t rows, start;    // of the block of queries
  int64_t image_rows;     // of the image: those from there on are not read
  const int32_t* bounds;  // [rows, 2]: the first row that a query sees, and the first behind; or null
  float scale;            // of the scores; above 0
  void* out;              // activation dtype [rows, H, D]
};

// The queries of a unit, for one head.
constexpr int kEncodeQueries = 64;

struct EncodeUnits {
  const EncodeTask* task;
  int64_t queries;  // of a unit, at most kEncodeQueries
  int64_t blocks() const { return ceil_div(task->rows, queries); }
  int64_t units() const { return task->kept.heads * blocks(); }
};

// Rows of embeddings of images, as wide as `parts` rows of x; and the row of each row of x, or a negative number.
struct ImageRowsTask {
  int64_t rows, width, slots_count, parts, part;
  const int32_t* slots;  // [rows]
};

struct PlaceRowsTask {
  ImageRowsTask rows;
  const void* images;  // activation dtype [S, parts, width]
  float* x;            // [rows, width]: replaced, or added to
  bool adds;
};

// Runs on the calling thread.
struct KeepRowsTask {
  ImageRowsTask rows;
  int64_t element_bytes;
  const void* x;  // [rows, width]
  void* images;   // [S, parts, width]
};

}  // namespace cadenza
