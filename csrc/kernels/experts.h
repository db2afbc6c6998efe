// Mixture of experts: routing, and matrix products of rows grouped by expert.
//
// The products are those of kernels/linear.h: an expert's output for a row is bitwise equal to the
// dense product's, independent of the other rows in the group. A row's outputs are summed in the
// order of its slots.
#pragma once

#include "core/kernel_table.h"
#include "kernels/linear.h"

namespace cadenza::CADENZA_ISA {

// The largest of a row's logits; NaN if any is NaN.
inline float largest_logit(const float* logits, int64_t experts) {
  float largest = logits[0];
  for (int64_t id = 1; id < experts; id++) {
    if (logits[id] > largest || logits[id] != logits[id]) largest = logits[id];
    if (largest != largest) return largest;
  }
  return largest;
}

// The ids of the largest logits in descending order, ties to the lowest id.
inline void choose_experts(const float* logits, int64_t experts, int64_t num_chosen, int32_t* ids) {
  int64_t held = 0;
  for (int64_t id = 0; id < experts; id++) {
    if (held == num_chosen && !(logits[id] > logits[ids[held - 1]])) continue;
    int64_t at = held < num_chosen ? held++ : held - 1;
    for (; at > 0 && logits[id] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
    ids[at] = int32_t(id);
  }
}

// The sum of the two largest of a group's scores.
inline float group_score(const float* scores, int64_t size) {
  float first = -__builtin_inff(), second = first;
  for (int64_t i = 0; i < size; i++) {
    second = scores[i] > first ? first : scores[i] > second ? scores[i] : second;
    if (scores[i] > first) first = scores[i];
  }
  return size == 1 ? first : first + second;
}

// Makes the scores of groups that are not chosen -inf.
inline void keep_best_groups(const BiasedChoice& choice, int64_t experts, float* scores,
                             Arena& arena) {
  const int64_t count = choice.num_groups, size = experts / count;
  float* of_groups = arena.take<float>(count);
  int32_t* kept = arena.take<int32_t>(choice.num_chosen_groups);
  for (int64_t g = 0; g < count; g++) of_groups[g] = group_score(scores + g * size, size);
  choose_experts(of_groups, count, choice.num_chosen_groups, kept);
  for (int64_t g = 0; g < count; g++) {
    bool is_kept = false;
    for (int64_t i = 0; i < choice.num_chosen_groups; i++) is_kept |= kept[i] == g;
    for (int64_t i = g * size; !is_kept && i < (g + 1) * size; i++) scores[i] = -__builtin_inff();
  }
}

// Writes exp(logits - largest) and returns the sum, in an order fixed by the number of experts.
inline float exponentials(const float* logits, int64_t experts, float largest, float* out) {
  Vec sum = zero();
  for (int64_t i = 0; i < experts; i += kLanes) {
    int n = int(experts - i < kLanes ? experts - i : kLanes);
    Vec e = exp_vec(sub(load_some(logits + i, n), set1(largest)));
    e = select(first(n), e, zero());
    store(out + i, e);
    sum = add(sum, e);
  }
  return reduce_add(sum);
}

// Writes the sigmoids of the logits.
inline void sigmoids(const float* logits, int64_t experts, float* out) {
  for (int64_t i = 0; i < experts; i += kLanes) {
    int n = int(experts - i < kLanes ? experts - i : kLanes);
    store(out + i, sigmoid(load_some(logits + i, n)));
  }
}

inline void write_expert_weights(const RouteTask& task, const float* exps, float total,
                                 const int32_t* ids, float* weights) {
  if (task.over_chosen) {
    total = 0.0f;
    for (int64_t s = 0; s < task.num_chosen; s++) total += exps[ids[s]];
    total += task.least_sum;
  }
  for (int64_t s = 0; s < task.num_chosen; s++) weights[s] = exps[ids[s]] / total * task.scale;
  if (task.factors == nullptr) return;
  for (int64_t s = 0; s < task.num_chosen; s++) weights[s] *= task.factors[ids[s]];
}

inline void route_row(const RouteTask& task, const float* logits, int64_t row, Arena& arena) {
  const int64_t experts = task.product.n;
  int32_t* ids = task.ids + row * task.num_chosen;
  float* weights = task.weights + row * task.num_chosen;
  float largest = largest_logit(logits, experts);
  if (!(largest - largest == 0.0f)) {  // NaN or infinite: the softmax is undefined
    for (int64_t s = 0; s < task.num_chosen; s++) {
      ids[s] = int32_t(s);
      weights[s] = __builtin_nanf("");
    }
    return;
  }
  float* exps = arena.take<float>(round_up(experts, kLanes));
  float total = 1.0f;
  if (task.sigmoid) {
    sigmoids(logits, experts, exps);
  } else {
    total = exponentials(logits, experts, largest, exps);
  }
  if (task.choice.bias == nullptr) {
    choose_experts(logits, experts, task.num_chosen, ids);
  } else {
    float* scores = arena.take<float>(experts);
    for (int64_t i = 0; i < experts; i++) scores[i] = exps[i] + task.choice.bias[i];
    if (task.choice.num_groups > 1) keep_best_groups(task.choice, experts, scores, arena);
    choose_experts(scores, experts, task.num_chosen, ids);
  }
  write_expert_weights(task, exps, total, ids, weights);
}

inline void route_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const RouteUnits*>(context);
  const int64_t experts = units.task->product.n;
  for (int64_t row = begin; row < end; row++) {
    worker.arena.reset();
    route_row(*units.task, units.logits + row * experts, row, worker.arena);
  }
}

// Finishes one row of one panel. Not inlined: each product would have a copy of three activations.
template <class T>
[[gnu::noinline]] void finish_gated(const GatedTask& task, int64_t column, int64_t row,
                                    const Vec (&columns)[kPanelVecs]) {
  switch (task.activation) {
    case Activation::kSilu:
      return GatedEpilogue<T, Activation::kSilu>{task, column}(row, columns);
    case Activation::kGeluTanh:
      return GatedEpilogue<T, Activation::kGeluTanh>{task, column}(row, columns);
    case Activation::kGelu:
      return GatedEpilogue<T, Activation::kGelu>{task, column}(row, columns);
    case Activation::kClampedSwiglu:
      return GatedEpilogue<T, Activation::kClampedSwiglu>{task, column}(row, columns);
  }
}

// Finishes a gathered row's columns and stores them at the row's pair.
template <class T>
struct GroupedGatedEpilogue {
  const GatedTask& task;
  const int32_t* pairs;
  int64_t column;

  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    finish_gated<T>(task, column, pairs[row], columns);
  }
};

template <class T>
struct HeadEpilogue {
  const HeadLinearTask& task;
  int64_t head, column;

  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    T* out = static_cast<T*>(task.out) + (row * task.heads + head) * task.n + column;
    for (int j = 0; j < kPanelVecs; j++) {
      const int64_t n = task.n - column - j * kLanes;
      if (n > 0) store_some(out + j * kLanes, columns[j], int(n < kLanes ? n : kLanes));
    }
  }
};

// The weight of the group behind group g, which is read next; empty behind the last.
template <class P>
PrefetchRange following_weight(const ExpertGroups& experts, int64_t g, const void* w, int64_t panels,
                               int64_t k) {
  if (g + 1 == experts.num_groups) return {};
  const void* next = P::expert(w, experts.groups[g + 1].expert, panels, k);
  return {static_cast<const char*>(next), static_cast<const char*>(next) + kMaxPrefetchBytes};
}

// A unit is one panel of one expert for one block of its rows.
template <class P, class T>
void grouped_gated_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const GroupedGatedUnits*>(context);
  const ExpertGroups& experts = units.experts;
  GatedTask task = units.task->product;
  Worker within{worker.index, worker.arena, worker.arranged};  // share_end counts the job's units
  for (int64_t g = 0; g < experts.num_groups; g++) {
    const ExpertGroup& group = experts.groups[g];
    int64_t first = begin - group.first_unit, last = end - group.first_unit;
    if (first < 0) first = 0;
    if (last > group.grid.units()) last = group.grid.units();
    if (first >= last) continue;
    const float* bias = units.task->product.bias;
    task.bias = bias == nullptr ? nullptr : bias + group.expert * 2 * task.f;
    within.prefetch = following_weight<P>(experts, g, task.w, group.grid.panels, task.k);
    P::run(P::row(experts.x, group.first, task.k),
           P::expert(task.w, group.expert, group.grid.panels, task.k), group.grid, first, last,
           within, [&](int64_t panel) {
             return GroupedGatedEpilogue<T>{task, experts.pairs + group.first, panel * kLanes};
           });
  }
}

// A unit is one panel of one head's weight for one block of rows.
template <class P, class T>
void head_linear_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const HeadLinearUnits*>(context);
  const HeadLinearTask& task = *units.task;
  Worker within{worker.index, worker.arena, worker.arranged};  // share_end counts the job's units
  for (int64_t g = 0; g < units.heads.num_groups; g++) {
    const ExpertGroup& group = units.heads.groups[g];
    int64_t first = begin - group.first_unit, last = end - group.first_unit;
    if (first < 0) first = 0;
    if (last > group.grid.units()) last = group.grid.units();
    if (first >= last) continue;
    within.prefetch = following_weight<P>(units.heads, g, task.w, group.grid.panels, task.k);
    P::run(P::row(units.heads.x, group.first, task.k),
           P::expert(task.w, group.expert, group.grid.panels, task.k), group.grid, first, last,
           within, [&](int64_t panel) {
             return HeadEpilogue<T>{task, group.expert, panel * kPanel};
           });
  }
}

// Stores a gathered row's columns as f32 partial results, to be combined with the row's other
// slots.
struct PartialEpilogue {
  float* partials;  // of the panel: [pairs, stride]
  int64_t stride;
  const int32_t* pairs;
  const float* bias;  // of the panel, or null
  int64_t num_columns;

  void operator()(int64_t row, const Vec (&columns)[kPanelVecs]) const {
    float* out = partials + pairs[row] * stride;
    for (int j = 0; j < kPanelVecs; j++) {
      int64_t n = num_columns - j * kLanes;
      Vec value = columns[j];
      if (bias != nullptr && n > 0) {
        value = add(value, load_some(bias + j * kLanes, int(n < kLanes ? n : kLanes)));
      }
      store(out + j * kLanes, value);
    }
  }
};

// A unit is one panel of one expert for all of its rows: the panels of the block of one expert, then
// those of the next.
template <class P>
void grouped_linear_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  const auto& units = *static_cast<const GroupedLinearUnits*>(context);
  const ExpertGroups& experts = units.experts;
  const LinearTask& task = units.task->product;
  const int64_t stride = units.num_panels * kPanel, panels = ceil_div(task.n, kPanel);
  Worker within{worker.index, worker.arena, worker.arranged};  // share_end counts the job's units
  for (int64_t unit = begin; unit < end;) {
    const int64_t g = unit / units.num_panels, first = unit % units.num_panels;
    const int64_t left = units.num_panels - first, count = left < end - unit ? left : end - unit;
    const ExpertGroup& group = experts.groups[g];
    const float* bias = task.bias == nullptr ? nullptr : task.bias + group.expert * task.n;
    within.prefetch = following_weight<P>(experts, g, task.w, panels, task.k);
    P::run(P::row(experts.x, group.first, task.k), P::expert(task.w, group.expert, panels, task.k),
           {group.rows, task.k, panels, 1}, units.first_panel + first,
           units.first_panel + first + count, within, [&](int64_t panel) {
             int64_t column = panel * kPanel;
             return PartialEpilogue{units.partials + (panel - units.first_panel) * kPanel, stride,
                                    experts.pairs + group.first,
                                    bias == nullptr ? nullptr : bias + column, task.n - column};
           });
    unit += count;
  }
}

// Writes the weighted sum over each row's slots, in ascending order. A unit is one panel of the block.
template <class T>
void combine_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const auto& units = *static_cast<const GroupedLinearUnits*>(context);
  const GroupedLinearTask& task = *units.task;
  const int64_t stride = units.num_panels * kPanel, chosen = task.choice.num_chosen;
  LinearTask product = task.product;
  product.bias = nullptr;  // already in the partial results
  const LinearEpilogue<T> epilogue{product, 0};
  for (int64_t row = 0; row < product.rows; row++) {
    for (int64_t i = begin * kPanel; i < end * kPanel; i += kLanes) {
      Vec sum = zero();
      for (int64_t pair = row * chosen; pair < (row + 1) * chosen; pair++) {
        if (!task.choice.has_expert(pair)) continue;
        sum = fma(set1(task.weights[pair]), load(units.partials + pair * stride + i), sum);
      }
      epilogue.finish(row, units.first_panel * kPanel + i, sum);
    }
  }
}

}  // namespace cadenza::CADENZA_ISA
