// Partitions the operations of image towers into units.
#include <algorithm>
#include <cstring>

#include "core/ops.h"

namespace cadenza {

void layer_norm(const Runtime& runtime, DType dtype, const LayerNormTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.encoder.layer_norm[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements);
}

void activate(const Runtime& runtime, DType dtype, const ActivateTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.encoder.activate[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.width > kMinParallelElements / 4);
}

void keep_heads(const Runtime& runtime, DType dtype, const KeepHeadsTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.encoder.keep_heads[index_of(dtype)], &task, task.rows, 16},
            task.rows * task.kept.width() > kMinParallelElements / 4);
}

namespace {

// Fewer queries a unit where threads would have none: each reads the keys that its unit needs.
int64_t queries_of_unit(const EncodeTask& task, int threads) {
  int64_t queries = kEncodeQueries;
  while (queries > kLanes &&
         task.kept.heads * ceil_div(task.rows, queries) < 2 * int64_t(threads)) {
    queries /= 2;
  }
  return queries;
}

}  // namespace

void encode_attend(const Runtime& runtime, DType dtype, const EncodeTask& task) {
  if (task.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  const EncodeUnits units{&task, queries_of_unit(task, lease.num_threads())};
  lease.run({runtime.kernels.encoder.encode[index_of(dtype)], &units, units.units(), 1},
            task.rows * task.image_rows * task.kept.width() > kMinParallelOps);
}

void place_rows(const Runtime& runtime, DType dtype, const PlaceRowsTask& task) {
  if (task.rows.rows == 0) return;
  Executor::Lease lease(runtime.executor);
  lease.run({runtime.kernels.encoder.place[index_of(dtype)], &task, task.rows.rows, 16},
            task.rows.rows * task.rows.width > kMinParallelElements);
}

void keep_rows(const KeepRowsTask& task) {
  const ImageRowsTask& rows = task.rows;
  const size_t bytes = size_t(rows.width * task.element_bytes);
  for (int64_t row = 0; row < rows.rows; row++) {
    const int64_t slot = rows.slots[row];
    if (slot < 0 || slot >= rows.slots_count) continue;
    char* to = static_cast<char*>(task.images) + size_t(slot * rows.parts + rows.part) * bytes;
    std::memcpy(to, static_cast<const char*>(task.x) + size_t(row) * bytes, bytes);
  }
}

}  // namespace cadenza
