// Instantiates every kernel for this translation unit's ISA.
#pragma once

#include "kernels/attention_latent.h"
#include "kernels/encoder.h"
#include "kernels/encoder_attention.h"
#include "kernels/experts.h"
#include "kernels/float8.h"
#include "kernels/gated_delta.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/prompt_scores.h"
#include "kernels/roofline.h"
#include "kernels/sampling.h"
#include "kernels/selective_scan.h"

namespace cadenza::CADENZA_ISA {

constexpr KernelTable make_table(const char* isa) {
  using Bf16 = FloatProduct<bf16>;
  using F32 = FloatProduct<float>;
  return {isa,
          {kMaxRows, kMaxRows},
          {linear_units<Bf16, bf16>, linear_units<F32, float>},
          {gated_units<Bf16, bf16>, gated_units<F32, float>},
          {norm_units<bf16>, norm_units<float>},
          {gate_units<bf16>, gate_units<float>},
          {convert_units<bf16>, convert_units<float>},
          {embed_units<bf16>, embed_units<float>},
          {append_units<FloatKv<bf16>>, append_units<FloatKv<float>>},
          {attend_units<FloatKv<bf16>>, attend_units<FloatKv<float>>},
          {append_units<LatentKv<bf16>>, append_units<LatentKv<float>>},
          {attend_units<LatentKv<bf16>>, attend_units<LatentKv<float>>},
          {merge_units<bf16>, merge_units<float>},
          {weigh_key_units<FloatKv<bf16>>, weigh_key_units<FloatKv<float>>},
          normalise_units,
          pool_weight_units,
          {delta_convolve_units<bf16>, delta_convolve_units<float>},
          {gated_delta_units<bf16>, gated_delta_units<float>},
          {short_conv_units<bf16>, short_conv_units<float>},
          {scan_convolve_units<bf16>, scan_convolve_units<float>},
          {selective_scan_units<bf16>, selective_scan_units<float>},
          {scan_norm_units<bf16>, scan_norm_units<float>},
          {logits_units<Bf16>, logits_units<F32>},
          sample_units,
          route_units,
          {grouped_gated_units<Bf16, bf16>, grouped_gated_units<F32, float>},
          {grouped_linear_units<Bf16>, grouped_linear_units<F32>},
          {combine_units<bf16>, combine_units<float>},
          {head_linear_units<Bf16, bf16>, head_linear_units<F32, float>},
          read_units,
          {multiply_units<bf16>, multiply_units<float>},
          make_float8_kernels(),
          {{layer_norm_units<bf16>, layer_norm_units<float>},
           {activate_units<bf16>, activate_units<float>},
           {keep_heads_units<bf16>, keep_heads_units<float>},
           {encode_units<bf16>, encode_units<float>},
           {place_units<bf16>, place_units<float>}}};
}

}  // namespace cadenza::CADENZA_ISA
