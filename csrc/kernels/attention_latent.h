// Attention over latents (multi-head latent attention, arXiv 2405.04434) in its absorbed form: all
// query heads share one key of D = L + rotary size values, whose first L are also the value.
//
// Pages hold keys only. A span's values are the transposes of its key sub-blocks, made once for all
// tiles of a unit that read them: [16/step][L][step], as kernels/attention_float.h multiplies them.
#pragma once

#include "kernels/attention_float.h"

namespace cadenza::CADENZA_ISA {

constexpr int kMaxLatentKey = 1024;

template <class T>
using LatentKv = FloatKv<T, false>;

// Four units of eight bytes: two words of four values' rows, which a transpose moves together.
typedef uint64_t Units __attribute__((vector_size(32), aligned(4)));
typedef uint32_t UnitWords __attribute__((vector_size(32), aligned(4)));
typedef uint16_t UnitHalves __attribute__((vector_size(32), aligned(4)));

// Transposes four rows of four units and stores them at a stride of words.
inline void store_transposed(const Units (&rows)[4], uint32_t* to, int64_t stride) {
  const Units a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 2, 6);
  const Units b = __builtin_shufflevector(rows[0], rows[1], 1, 5, 3, 7);
  const Units c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 2, 6);
  const Units d = __builtin_shufflevector(rows[2], rows[3], 1, 5, 3, 7);
  const Units columns[4] = {__builtin_shufflevector(a, c, 0, 1, 4, 5),
                            __builtin_shufflevector(b, d, 0, 1, 4, 5),
                            __builtin_shufflevector(a, c, 2, 3, 6, 7),
                            __builtin_shufflevector(b, d, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) __builtin_memcpy(to + i * stride, &columns[i], sizeof(Units));
}

template <class V>
[[gnu::always_inline]] inline void load_units(V& units, const uint32_t* from) {
  __builtin_memcpy(&units, from, sizeof(V));
}

// A sub-block of keys, [D/2][16] words of two elements, as values, [8][L] words of two tokens. Eight
// bytes are two tokens' elements d and d + 1; their halves change places.
inline void transpose_block(const bf16* keys, int64_t size, bf16* values) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(keys);
  uint32_t* to = reinterpret_cast<uint32_t*>(values);
  for (int64_t pair = 0; pair < size / 2; pair += 4) {
    for (int half = 0; half < 2; half++) {
      Units rows[4];
      for (int i = 0; i < 4; i++) {
        UnitHalves words;
        load_units(words, from + (pair + i) * kLanes + half * 8);
        rows[i] = Units(__builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11,
                                                12, 14, 13, 15));
      }
      store_transposed(rows, to + half * 4 * size + pair * 2, size);
    }
  }
}

// The same of f32: [D][16] as [16][L]. Eight bytes are a token's elements d and d + 1.
inline void transpose_block(const float* keys, int64_t size, float* values) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(keys);
  uint32_t* to = reinterpret_cast<uint32_t*>(values);
  for (int64_t d = 0; d < size; d += 8) {
    for (int half = 0; half < 2; half++) {
      Units low[4], high[4];
      for (int i = 0; i < 4; i++) {
        const uint32_t* at = from + (d + 2 * i) * kLanes + half * 8;
        UnitWords a, b;
        load_units(a, at);
        load_units(b, at + kLanes);
        low[i] = Units(__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11));
        high[i] = Units(__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15));
      }
      store_transposed(low, to + half * 8 * size + d, size);
      store_transposed(high, to + (half * 8 + 4) * size + d, size);
    }
  }
}

template <class T>
struct AttendOperands<LatentKv<T>> {
  AttendOperands(Arena& arena, int64_t head_size)
      : queries(arena.take<Input<T>>(kAttendRows * head_size)),
        weights(arena.take<Input<T>>(kAttendRows * kSpan)),
        values(arena.take<T>(kSpan * head_size)) {}

  // The values of the span's sub-block number `block`, whose keys are given.
  const T* values_of(const AttendTask& task, int block, const T* keys) {
    T* own = values + block * kLanes * task.value_size;
    if (transposed[block] != keys) transpose_block(keys, task.value_size, own);
    transposed[block] = keys;
    return own;
  }

  Input<T>* const queries;
  Input<T>* const weights;
  T* const values;                              // [512, L]
  const T* transposed[kBlocksPerSpan] = {};     // the keys of which the values were made
};

// Calls store_at(i, values) for each sixteen elements of a part that is rotated. Pairs of neighbours
// become two halves.
template <class T, class StoreAt>
inline void rotate_part(const AttendTask& task, int64_t token, const T* raw,
                              const StoreAt& store_at) {
  alignas(64) float pairs[kMaxLatentKey], work[kMaxLatentKey];
  const int64_t size = task.rotary_size;
  for (int64_t i = 0; i < size; i += kLanes) store(pairs + i, Elem<T>::load(raw + i));
  for (int64_t i = 0; i < size / 2; i++) {
    const bool paired = task.latent.pairs_neighbours;
    work[i] = pairs[paired ? 2 * i : i];
    work[size / 2 + i] = pairs[paired ? 2 * i + 1 : size / 2 + i];
  }
  rotate_head(task, rope_row(task, token), work);
  for (int64_t i = 0; i < size; i += kLanes) store_at(i, load(work + i));
}

template <class T>
inline void prepare_query(AttendTile<LatentKv<T>>& tile, int i) {
  const AttendTask& task = tile.task;
  const LatentInputs& inputs = task.latent;
  const int64_t size = task.value_size, place = tile.token(i) * task.heads + tile.head(i);
  Input<T>* query = tile.operands.queries + i * task.head_size;
  const T* absorbed = static_cast<const T*>(inputs.absorbed) + place * size;
  for (int64_t d = 0; d < size; d += kLanes) {
    Elem<T>::store_input(query + d, Elem<T>::load(absorbed + d));
  }
  const T* end = static_cast<const T*>(inputs.queries) + (place + 1) * inputs.query_size;
  rotate_part(task, tile.token(i), end - task.rotary_size, [&](int64_t d, Vec values) {
    Elem<T>::store_input(query + size + d, values);
  });
}

template <class T>
inline void append_token(LatentKv<T>, const AttendTask& task, NewTokens, int64_t token,
                         int64_t kv_head) {
  alignas(64) T key[kMaxLatentKey];
  const int64_t size = task.value_size, slot = task.slot_mapping[token];
  const float* raw = task.latent.keys + token * task.head_size;
  const Vec inverse = set1(inverse_rms(raw, size, task.norm_eps));
  for (int64_t d = 0; d < size; d += kLanes) {
    Elem<T>::store(key + d, mul(mul(load(raw + d), inverse), load(task.k_weight + d)));
  }
  rotate_part(task, token, raw + size,
              [&](int64_t d, Vec values) { Elem<T>::store(key + size + d, values); });
  const int64_t offset = slot % task.page_size;
  const int64_t at = block_offset<LatentKv<T>>(task, slot / task.page_size, kv_head, offset);
  write_key(LatentKv<T>{}, task, key, static_cast<char*>(task.k_pool) + at, offset % kLanes);
}

}  // namespace cadenza::CADENZA_ISA
