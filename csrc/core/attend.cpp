// Plans ragged attention: its units, whether rows are split by spans, and when keys are appended.
#include <algorithm>

#include "core/ops.h"

namespace cadenza {

namespace {

// Maximum queries of one unit times heads of the group: each loaded key is reused for all of them.
constexpr int64_t kQueriesPerUnit = 48;

struct Partition {
  int64_t queries_per_unit;
  bool split_spans;
};

int64_t num_queries(const AttendTask& task, int64_t row) {
  return task.query_starts[row + 1] - task.query_starts[row];
}

int64_t num_spans(const AttendTask& task, int64_t row) {
  int32_t shift = kHasFaults ? task.span_shift(row) : 0;
  return ceil_div(task.kv_lens[row] + shift, kSpan);
}

// Splits rows by spans only if there are too few units to occupy the threads.
Partition choose_partition(const AttendTask& task, int threads) {
  Partition partition{std::max<int64_t>(1, kQueriesPerUnit / task.group()), false};
  int64_t units = 0, spans = 0;
  for (int64_t row = 0; row < task.rows; row++) {
    if (num_queries(task, row) == 0) continue;
    units += task.kv_heads * ceil_div(num_queries(task, row), partition.queries_per_unit);
    spans = std::max(spans, num_spans(task, row));
  }
  partition.split_spans = spans > 1 && threads > 1 && units < 8 * threads;
  return partition;
}

class Planner {
 public:
  Planner(const AttendTask& task, Partition partition, Arena& scratch)
      : task_(task), partition_(partition) {
    int64_t most = 0;
    for (int64_t row = 0; row < task.rows; row++) {
      if (num_queries(task, row) == 0) continue;
      int64_t blocks = ceil_div(num_queries(task, row), partition.queries_per_unit);
      most += blocks * task.kv_heads * (partition.split_spans ? num_spans(task, row) : 1);
      has_blocks_ |= blocks > 1;
    }
    units_ = scratch.take<AttendUnit>(most);
    groups_ = scratch.take<MergeGroup>(most);
    for (int64_t row = 0; row < task.rows; row++) add_row(row);
  }

  const AttendUnit* units() const { return units_; }
  const MergeGroup* groups() const { return groups_; }
  int64_t num_units() const { return num_units_; }
  int64_t num_groups() const { return num_groups_; }
  int64_t num_partials() const { return num_partials_; }
  // True if each (row, KV head) is one unit, which then appends its keys before it attends.
  bool append_inside() const { return !has_blocks_ && num_groups_ == 0; }

 private:
  void add_row(int64_t row) {
    int64_t queries = num_queries(task_, row);
    for (int64_t begin = 0; begin < queries; begin += partition_.queries_per_unit) {
      int64_t end = std::min(begin + partition_.queries_per_unit, queries);
      for (int64_t head = 0; head < task_.kv_heads; head++) add_block(row, head, begin, end);
    }
  }

  void add_block(int64_t row, int64_t head, int64_t begin, int64_t end) {
    const int32_t* positions = task_.positions + task_.query_starts[row];
    int64_t low = task_.window > 0 ? std::max<int64_t>(0, positions[begin] - task_.window + 1) : 0;
    int32_t shift = kHasFaults ? task_.span_shift(row) : 0;
    AttendUnit unit{int32_t(row),
                    int32_t(head),
                    int32_t(begin),
                    int32_t(end),
                    int32_t((low + shift) / kSpan),
                    int32_t((positions[end - 1] + shift) / kSpan + 1),
                    -1};
    if (!partition_.split_spans || unit.span_end - unit.span_begin < 2) {
      units_[num_units_++] = unit;
      return;
    }
    groups_[num_groups_++] = {num_units_, unit.span_end - unit.span_begin};
    for (int32_t span = unit.span_begin; span < unit.span_end; span++) {
      units_[num_units_++] = {unit.row, unit.kv_head, unit.query_begin, unit.query_end,
                              span,     span + 1,     num_partials_};
      num_partials_ += (end - begin) * task_.group();
    }
  }

  const AttendTask& task_;
  const Partition partition_;
  AttendUnit* units_;
  MergeGroup* groups_;
  int64_t num_units_ = 0, num_groups_ = 0, num_partials_ = 0;
  bool has_blocks_ = false;
};

struct AttendKernels {
  UnitFn append, attend, merge;
};

AttendKernels attend_kernels(const Runtime& runtime, DType dtype, KvFormat format) {
  const int type = static_cast<int>(dtype);
  if (format == KvFormat::kInt8) {
    const IntegerKernels& table = runtime.integer;
    return {table.append[type], table.attend[type], table.merge[type]};
  }
  const KernelTable& table = runtime.kernels;
  return {table.append[type], table.attend[type], table.merge[type]};
}

}  // namespace

void rope_append_attend(const Runtime& runtime, DType dtype, const AttendTask& task) {
  if (task.num_tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  const AttendKernels kernels = attend_kernels(runtime, dtype, task.kv_format);
  Planner planner(task, choose_partition(task, lease.num_threads()), lease.scratch());
  int64_t stride = round_up(task.head_size + 2, kLanes);
  float* partials = lease.scratch().take<float>(planner.num_partials() * stride);
  AttendPlan plan{&task, planner.units(), planner.num_units(), planner.append_inside(), partials};
  if (!plan.append_inside) {
    lease.run({kernels.append, &plan, task.num_tokens, 32}, task.num_tokens > 8);
  }
  lease.run({kernels.attend, &plan, plan.num_units, 4}, true);
  if (planner.num_groups() == 0) return;
  MergePlan merge{&plan, planner.groups()};
  lease.run({kernels.merge, &merge, planner.num_groups(), 4},
            planner.num_partials() > 64);
}

}  // namespace cadenza
