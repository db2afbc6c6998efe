// Query and key preparation (norm, RoPE), and appending keys and values to pages.
//
// For each KV head a page holds sub-blocks of sixteen tokens: keys as [D/step][16][step], so that
// one vector accumulates the scores of sixteen tokens; values as [16/step][D][step]. Of codes, step
// is 4, and their scales follow (core/kv_codes.h).
#pragma once

#include "core/kv_codes.h"
#include "kernels/norm.h"

namespace cadenza::CADENZA_ISA {

constexpr int kMaxHeadSize = 512;

// Keys and values in the type of the activations, T. Without values of their own they are latents:
// kernels/attention_latent.h.
template <class T, bool V = true>
struct FloatKv {
  using Activation = T;
  using Stored = T;
  static constexpr bool kHasValues = V;
  static int64_t token_bytes(int64_t head_size) { return head_size * int64_t(sizeof(T)); }
};

// Offset in bytes, in either pool, of the sub-block that holds a slot of a page.
template <class Kv>
inline int64_t block_offset(const AttendTask& task, int64_t page, int64_t kv_head, int64_t offset) {
  int64_t layer = page * task.num_layers + task.layer;
  int64_t head = (layer * task.kv_heads + kv_head) * task.page_size;
  return (head + offset / kLanes * kLanes) * Kv::token_bytes(task.head_size);
}

// The query heads or the key heads of a token.
struct HeadKind {
  int64_t first, count;
  const float* weight;  // RMSNorm weight of these heads, or null
};
inline HeadKind kind_of(const AttendTask& task, int64_t head) {
  if (head < task.heads) return {0, task.heads, task.q_weight};
  return {task.heads, task.kv_heads, task.k_weight};
}

// Applies the optional norm to one head, in place. If the norm spans all heads of a kind, their RMS
// is recomputed for each head; the cost is negligible next to the qkv product.
template <class T>
inline void norm_head(const AttendTask& task, int64_t token, int64_t head, float* work) {
  HeadKind kind = kind_of(task, head);
  if (kind.weight == nullptr) return;
  float inverse = 0.0f;
  const float* weight = kind.weight;
  if (task.norm_spans_heads) {
    const T* row = static_cast<const T*>(task.qkv) + token * task.qkv_width();
    int64_t width = kind.count * task.head_size;
    inverse = inverse_rms(row + kind.first * task.head_size, width, task.norm_eps);
    weight += (head - kind.first) * task.head_size;
  } else {
    inverse = inverse_rms(work, task.head_size, task.norm_eps);
  }
  for (int64_t i = 0; i < task.head_size; i += kLanes) {
    store(work + i, mul(mul(load(work + i), set1(inverse)), load(weight + i)));
  }
}

// Applies RoPE in place: rotates the two halves of the first rotary_size elements.
inline void rotate_head(const AttendTask& task, int64_t position, float* head) {
  int64_t half = task.rotary_size / 2;
  const float* cosine = task.rope + position * task.rope_columns();
  const float* sine = cosine + half;
  for (int64_t i = 0; i < half; i += kLanes) {
    int n = int(half - i < kLanes ? half - i : kLanes);
    Vec a = load_some(head + i, n), b = load_some(head + half + i, n);
    Vec c = load_some(cosine + i, n), s = load_some(sine + i, n);
    store_some(head + i, fnma(b, s, mul(a, c)), n);
    store_some(head + half + i, fma(a, s, mul(b, c)), n);
  }
}

// Multiplies a query by the factor of its position.
inline void scale_query(const AttendTask& task, int64_t position, float* head) {
  const float factor = task.rope[position * task.rope_columns() + task.rotary_size];
  for (int64_t i = 0; i < task.head_size; i += kLanes) {
    store(head + i, mul(load(head + i), set1(factor)));
  }
}

inline int64_t rope_row(const AttendTask& task, int64_t token) {
  int64_t position = task.rope_positions[token];
  return position < 0 ? 0 : position < task.rope_rows ? position : task.rope_rows - 1;
}

// Loads one query or key head of a token, applies norm and RoPE, and calls store_at(i, values) for
// each sixteen of its elements.
template <class T, class StoreAt>
inline void prepare_head(const AttendTask& task, int64_t token, int64_t head,
                         const StoreAt& store_at) {
  alignas(64) float work[kMaxHeadSize];
  const T* raw = static_cast<const T*>(task.qkv) + token * task.qkv_width() + head * task.head_size;
  for (int64_t i = 0; i < task.head_size; i += kLanes) store(work + i, Elem<T>::load(raw + i));
  norm_head<T>(task, token, head, work);
  const int64_t position = rope_row(task, token);
  rotate_head(task, position, work);
  if (task.has_query_factors && head < task.heads) scale_query(task, position, work);
  for (int64_t i = 0; i < task.head_size; i += kLanes) store_at(i, load(work + i));
}

// Writes one key into its lane of a sub-block: D/step words at a stride of kLanes words.
template <class T, bool V>
inline void write_key(FloatKv<T, V>, const AttendTask& task, const T* key, char* block, int64_t lane) {
  uint32_t* to = reinterpret_cast<uint32_t*>(block) + lane;
  for (int64_t i = 0; i < task.head_size; i += kStep<T>) {
    uint32_t word;
    __builtin_memcpy(&word, key + i, 4);
    __builtin_memcpy(to, &word, 4);
    to += kLanes;
  }
}

// Writes one value by elements of T: another thread may write the other token of the same pair.
template <class T>
inline void write_value(const AttendTask& task, const T* value, T* block, int64_t lane) {
  T* to = block + lane / kStep<T> * task.head_size * kStep<T> + lane % kStep<T>;
  for (int64_t i = 0; i < task.head_size; i++) to[i * kStep<T>] = value[i];
}

// Writes the values of two consecutive tokens as pairs.
inline void write_value_pair(const AttendTask& task, const bf16* value, const bf16* next,
                             bf16* block, int64_t lane) {
  bf16* to = block + lane * task.head_size;
  for (int64_t i = 0; i < task.head_size; i++) {
    to[2 * i] = value[i];
    to[2 * i + 1] = next[i];
  }
}

// Tokens [begin, end) that are appended together.
struct NewTokens {
  int64_t begin, end;
};

// Writes a token's value, with the next one's if both are a pair; the second of a pair is skipped.
// Values that are not those of qkv are written one by one.
template <class T>
inline void append_value(FloatKv<T>, const AttendTask& task, NewTokens tokens, int64_t token,
                         const T* value, char* block) {
  const int64_t slot = task.slot_mapping[token], lane = slot % kLanes;
  T* to = reinterpret_cast<T*>(block);
  if constexpr (kStep<T> == 2) {
    if (task.norms_values) return write_value<T>(task, value, to, lane);
    bool has_next =
        token + 1 < tokens.end && slot % 2 == 0 && task.slot_mapping[token + 1] == slot + 1;
    if (has_next) write_value_pair(task, value, value + task.qkv_width(), to, lane);
    bool is_done =
        token > tokens.begin && slot % 2 == 1 && task.slot_mapping[token - 1] == slot - 1;
    if (has_next || is_done) return;
  }
  write_value<T>(task, value, to, lane);
}

// The norm of a value of qkv, in `normed` [D].
template <class T>
inline const T* norm_value(const AttendTask& task, const T* value, T* normed) {
  const Vec inverse = set1(inverse_rms(value, task.head_size, task.norm_eps));
  for (int64_t i = 0; i < task.head_size; i += kLanes) {
    Elem<T>::store(normed + i, mul(Elem<T>::load(value + i), inverse));
  }
  return normed;
}

inline bool is_stored(const AttendTask& task, int64_t token) {
  int64_t slot = task.slot_mapping[token];
  return slot >= 0 && slot < task.num_pages * task.page_size;
}

// Writes a token's key and value of one KV head to where its slot is in the pools.
template <class Kv>
inline void append_token(Kv, const AttendTask& task, NewTokens tokens, int64_t token,
                         int64_t kv_head) {
  using T = typename Kv::Activation;
  int64_t slot = task.slot_mapping[token], offset = slot % task.page_size;
  int64_t at = block_offset<Kv>(task, slot / task.page_size, kv_head, offset);
  alignas(64) T key[kMaxHeadSize];
  prepare_head<T>(task, token, task.heads + kv_head,
                  [&](int64_t i, Vec values) { Elem<T>::store(key + i, values); });
  write_key(Kv{}, task, key, static_cast<char*>(task.k_pool) + at, offset % kLanes);
  const T* value = static_cast<const T*>(task.qkv) + token * task.qkv_width() +
                   task.value_head(kv_head) * task.head_size;
  if (task.norms_values) value = norm_value(task, value, key);
  append_value(Kv{}, task, tokens, token, value, static_cast<char*>(task.v_pool) + at);
}

// Appends keys and values of new tokens for one KV head.
template <class Kv>
inline void append_tokens(const AttendTask& task, NewTokens tokens, int64_t kv_head) {
  for (int64_t token = tokens.begin; token < tokens.end; token++) {
    if (is_stored(task, token)) append_token(Kv{}, task, tokens, token, kv_head);
  }
}

// A unit is one token with all KV heads.
template <class Kv>
void append_units(const void* context, int64_t begin, int64_t end, Worker&) {
  const AttendTask& task = *static_cast<const AttendPlan*>(context)->task;
  for (int64_t head = 0; head < task.kv_heads; head++) {
    append_tokens<Kv>(task, {begin, end}, head);
  }
}

}  // namespace cadenza::CADENZA_ISA
