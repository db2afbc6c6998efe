// Plans ragged attention: its units, whether rows are split by spans or by heads, and when keys are
// appended.
#include <algorithm>

#include "core/ops.h"

namespace cadenza {

namespace {

// Maximum queries of one unit times heads of the group: each loaded key is reused for all of them.
constexpr int64_t kQueriesPerUnit = 48;

int64_t num_queries(const AttendTask& task, int64_t row) {
  return task.query_starts[row + 1] - task.query_starts[row];
}

int32_t span_shift(const AttendTask& task, int64_t row) {
  return kHasFaults ? task.span_shift(row) : 0;
}

// Queries of a row that one unit computes, and the spans that they see.
struct QueryBlock {
  int64_t begin, end;
  int32_t span_begin, span_end;
  int32_t num_spans() const { return span_end - span_begin; }
  int64_t work() const { return (end - begin) * num_spans(); }
};

QueryBlock query_block(const AttendTask& task, int64_t row, int64_t begin, int64_t end) {
  const int64_t first = task.query_starts[row], low = task.begin_of_context(first + begin);
  const int64_t last = task.end_of_context(first + end - 1) - 1;
  int32_t shift = span_shift(task, row);
  return {begin, end, int32_t((low + shift) / kSpan), int32_t((last + shift) / kSpan + 1)};
}

// Calls body(row, block) for each block of queries.
template <class Body>
void for_each_block(const AttendTask& task, Body&& body) {
  const int64_t most = std::max<int64_t>(1, kQueriesPerUnit / task.group());
  for (int64_t row = 0; row < task.rows; row++) {
    const int64_t queries = num_queries(task, row);
    for (int64_t begin = 0; begin < queries; begin += most) {
      body(row, query_block(task, row, begin, std::min(begin + most, queries)));
    }
  }
}

// A block is split by spans if its work exceeds this, so that the threads have an equal share.
int64_t most_unsplit_work(const AttendTask& task, int threads) {
  if (threads == 1) return INT64_MAX;
  int64_t work = 0;
  for_each_block(task, [&](int64_t, const QueryBlock& block) { work += block.work(); });
  return work * task.unit_heads() / (8 * threads);
}

class Planner {
 public:
  Planner(const AttendTask& task, int threads, Arena& scratch)
      : task_(task), most_unsplit_work_(most_unsplit_work(task, threads)) {
    int64_t most = 0;
    for_each_block(task, [&](int64_t, const QueryBlock& block) {
      most += task.unit_heads() * (is_split(block) ? block.num_spans() : 1);
    });
    units_ = scratch.take<AttendUnit>(most);
    groups_ = scratch.take<MergeGroup>(most);
    for_each_block(task, [&](int64_t row, const QueryBlock& block) {
      has_blocks_ |= block.begin > 0;
      for (int64_t head = 0; head < task.unit_heads(); head++) add_block(row, head, block);
    });
  }

  const AttendUnit* units() const { return units_; }
  const MergeGroup* groups() const { return groups_; }
  int64_t num_units() const { return num_units_; }
  int64_t num_groups() const { return num_groups_; }
  int64_t num_partials() const { return num_partials_; }
  // True if each (row, KV head) is one unit, which then appends its keys before it attends.
  bool append_inside() const {
    return appends() && !has_blocks_ && num_groups_ == 0 && task_.head_parts == 1;
  }
  bool append_before() const { return appends() && !append_inside(); }

 private:
  bool appends() const { return task_.kv_parts > 0; }
  bool is_split(const QueryBlock& block) const {
    return block.num_spans() > 1 && block.work() > most_unsplit_work_;
  }

  void add_block(int64_t row, int64_t head, const QueryBlock& block) {
    AttendUnit unit{int32_t(row),       int32_t(head),      int32_t(block.begin),
                    int32_t(block.end), block.span_begin,   block.span_end,
                    -1};
    if (!is_split(block)) {
      units_[num_units_++] = unit;
      return;
    }
    groups_[num_groups_++] = {num_units_, block.num_spans()};
    for (int32_t span = block.span_begin; span < block.span_end; span++) {
      unit.span_begin = span;
      unit.span_end = span + 1;
      unit.partial = num_partials_;
      units_[num_units_++] = unit;
      num_partials_ += (block.end - block.begin) * task_.group();
    }
  }

  const AttendTask& task_;
  const int64_t most_unsplit_work_;
  AttendUnit* units_;
  MergeGroup* groups_;
  int64_t num_units_ = 0, num_groups_ = 0, num_partials_ = 0;
  bool has_blocks_ = false;
};

// Parts of the query heads of latents, which share their only key, so that few rows are a unit or
// more for each thread. A part has at least kMinPartHeads: each reads the keys anew.
constexpr int64_t kMinPartHeads = 8;
int64_t num_head_parts(const AttendTask& task, int threads) {
  int64_t units = 0, parts = 1;
  for_each_block(task, [&](int64_t, const QueryBlock& block) { units += block.num_spans(); });
  for (int64_t more = 2; units * parts < threads && task.heads / more >= kMinPartHeads; more++) {
    if (task.heads % more == 0) parts = more;
  }
  return parts;
}

struct AttendKernels {
  UnitFn append, attend, merge;
};

AttendKernels attend_kernels(const Runtime& runtime, DType dtype, const AttendTask& task) {
  const int type = static_cast<int>(dtype);
  if (task.kv_format == KvFormat::kInt8) {
    const IntegerKernels& table = runtime.integer;
    return {table.append[type], table.attend[type], table.merge[type]};
  }
  const KernelTable& table = runtime.kernels;
  if (task.has_latents()) {
    return {table.append_latents[type], table.attend_latents[type], table.merge[type]};
  }
  return {table.append[type], table.attend[type], table.merge[type]};
}

}  // namespace

void rope_append_attend(const Runtime& runtime, DType dtype, const AttendTask& whole) {
  if (whole.num_tokens == 0) return;
  Executor::Lease lease(runtime.executor);
  AttendTask task = whole;
  if (task.has_latents()) task.head_parts = num_head_parts(task, lease.num_threads());
  const AttendKernels kernels = attend_kernels(runtime, dtype, task);
  Planner planner(task, lease.num_threads(), lease.scratch());
  int64_t stride = round_up(task.value_size + 2, kLanes);
  float* partials = lease.scratch().take<float>(planner.num_partials() * stride);
  AttendPlan plan{&task, planner.units(), planner.num_units(), planner.append_inside(), partials};
  if (planner.append_before()) {
    lease.run({kernels.append, &plan, task.num_tokens, 32}, task.num_tokens > 8);
  }
  lease.run({kernels.attend, &plan, plan.num_units, 4}, true);
  if (planner.num_groups() == 0) return;
  MergePlan merge{&plan, planner.groups()};
  lease.run({kernels.merge, &merge, planner.num_groups(), 4},
            planner.num_partials() > 64);
}

namespace {

void score_row(const Runtime& runtime, Executor::Lease& lease, UnitFn weigh, ScorePlan& plan) {
  const AttendTask& attend = *plan.attend;
  plan.num_spans = ceil_div(plan.length(), kSpan);
  const int32_t query = attend.query_starts[plan.row + 1] - 1;
  plan.begins = attend.positions[query] == plan.length() - 1;
  plan.weights = lease.scratch().take<float>(attend.heads * plan.num_spans * kSpan);
  plan.maxima = lease.scratch().take<float>(attend.heads * plan.span_stride());
  plan.sums = lease.scratch().take<float>(attend.heads * plan.span_stride());
  lease.run({weigh, &plan, attend.kv_heads * plan.num_spans, 4}, true);
  lease.run({runtime.kernels.normalise, &plan, attend.heads, 4}, false);
  lease.run({runtime.kernels.pool_weights, &plan, plan.num_spans, 4}, plan.num_spans > 4);
}

}  // namespace

void score_keys(const Runtime& runtime, DType dtype, const ScoreTask& task) {
  AttendTask attend = task.attend;
  attend.kv_lens = task.score_lens;
  attend.v_pool = attend.k_pool;  // which is prefetched where attention prefetches values
  const int type = static_cast<int>(dtype);
  const bool has_codes = attend.kv_format == KvFormat::kInt8;
  const UnitFn weigh = (has_codes ? runtime.integer.weigh_keys : runtime.kernels.weigh_keys)[type];
  for (int64_t row = 0; row < attend.rows; row++) {
    if (!task.scores(row)) continue;
    Executor::Lease lease(runtime.executor);
    ScorePlan plan{};
    plan.task = &task;
    plan.attend = &attend;
    plan.row = row;
    score_row(runtime, lease, weigh, plan);
  }
}

}  // namespace cadenza
