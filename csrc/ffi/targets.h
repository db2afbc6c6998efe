// The operations that XLA can call, each as a target of its own or within a program. Operands,
// results and attributes are described above each definition.
#pragma once

#include "ffi/buffers.h"

namespace cadenza::xla_ffi {

ffi::Error embed_call(Any token_ids, Any table, Any count, AnyResult out, int64_t vocab,
                      float scale);
ffi::Error rms_norm_call(Any x, Any weight, Any count, AnyResult out, float eps);
ffi::Error rms_norm_add_call(Any x, Any weight, Any count, Any residual, Any factor, AnyResult out,
                             float eps);
ffi::Error gate_inputs_call(Any x, Any inputs, Any count, AnyResult out, int64_t first,
                            int64_t activation);
ffi::Error convert_call(Any x, Any count, AnyResult out);
ffi::Error take_rows_call(Any x, Any count, Any indices, AnyResult out);
ffi::Error reserve_call(AnyResult out);
ffi::Error linear_call(Any x, Any w, Any count, Any bias, Any residual, AnyResult out, float scale);
ffi::Error gated_linear_call(Any x, Any w, Any count, Any bias, AnyResult out, int64_t activation);
ffi::Error route_experts_call(Any x, Any w, Any count, Any bias, Any factors, Any choice_bias,
                              AnyResult ids, AnyResult weights, int64_t experts, bool over_chosen,
                              bool sigmoid, int64_t groups, int64_t chosen_groups, float scale,
                              float least_sum);
ffi::Error grouped_gated_linear_call(Any x, Any w, Any count, Any bias, Any ids, AnyResult out,
                                     int64_t activation);
ffi::Error grouped_linear_call(Any x, Any w, Any count, Any bias, Any residual, Any ids,
                               Any weights, AnyResult out);
ffi::Error rope_append_attend_call(Any qkv, Any positions, Any slot_mapping, Any query_starts,
                                   Any kv_lens, Any page_table, Any rope, Any q_weight,
                                   Any k_weight, Any k_pool, Any v_pool, Any sinks, Any gate,
                                   Any rope_positions, Any reaches, Any window_starts,
                                   AnyResult out, AnyResult k_out, AnyResult v_out, int64_t layer,
                                   int64_t heads, float scale, int64_t window, float soft_cap, float norm_eps,
                                   bool norms_values);
ffi::Error latent_attend_call(Any absorbed, Any queries, Any keys, Any positions, Any slot_mapping,
                              Any query_starts, Any kv_lens, Any page_table, Any rope, Any norm,
                              Any pool, Any rope_positions, AnyResult out, AnyResult pool_out,
                              int64_t layer, int64_t heads, float scale, float norm_eps, bool pairs_neighbours);
ffi::Error score_keys_call(Any qkv, Any positions, Any query_starts, Any score_lens, Any page_table,
                           Any rope, Any q_weight, Any k_pool, Any rope_positions, Any scores,
                           AnyResult out, int64_t layer, int64_t heads, float scale, float soft_cap,
                           float norm_eps, bool is_first, bool is_last);
ffi::Error head_linear_call(Any x, Any w, Any count, AnyResult out, int64_t width);
ffi::Error gated_delta_call(Any x, Any gate, Any rates, Any query_starts, Any initial, Any kept,
                            Any conv_weight, Any decay, Any decay_bias, Any norm_weight,
                            Any conv_pool, Any state_pool, AnyResult out, AnyResult conv_out,
                            AnyResult state_out, int64_t layer, int64_t key_heads,
                            bool tiled, float norm_eps);
ffi::Error short_conv_call(Any x, Any query_starts, Any initial, Any kept, Any conv_weight,
                           Any conv_bias, Any conv_pool, AnyResult out, AnyResult conv_out,
                           int64_t layer);
ffi::Error selective_scan_call(Any x, Any gate, Any rates, Any query_starts, Any initial, Any kept,
                               Any conv_weight, Any conv_bias, Any decay, Any rate_bias, Any skip,
                               Any norm_weight, Any conv_pool, Any state_pool, AnyResult out,
                               AnyResult conv_out, AnyResult state_out, int64_t layer,
                               int64_t groups, float norm_eps);
ffi::Error layer_norm_call(Any x, Any weight, Any bias, Any count, AnyResult out, float eps);
ffi::Error activate_call(Any x, Any count, AnyResult out, int64_t kind);
ffi::Error keep_heads_call(Any qkv, Any turns, Any q_weight, Any k_weight, Any start, Any count,
                           Any queries, Any keys, Any values, AnyResult queries_out,
                           AnyResult keys_out, AnyResult values_out, float norm_eps,
                           bool norms_values);
ffi::Error encode_attend_call(Any queries, Any keys, Any values, Any start, Any count,
                              Any num_rows, Any bounds, AnyResult out, float scale);
ffi::Error keep_rows_call(Any x, Any images, Any slots, Any count, AnyResult out, int64_t part);
ffi::Error place_rows_call(Any x, Any images, Any slots, Any count, AnyResult out, int64_t part,
                           bool adds);
ffi::Error next_token_call(Any x, Any head, Any count, Any columns, Any records, Any page_table,
                           Any history, AnyResult out, int64_t vocab, float divisor, float soft_cap,
                           int64_t page_size, int64_t banned);

}  // namespace cadenza::xla_ffi
