// Instantiates every kernel for this translation unit's ISA.
#pragma once

#include "kernels/attention.h"
#include "kernels/experts.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/roofline.h"
#include "kernels/sampling.h"

namespace cadenza::CADENZA_ISA {

constexpr KernelTable make_table(const char* isa) {
  return {isa,
          kMaxRows,
          {linear_units<bf16>, linear_units<float>},
          {gated_units<bf16>, gated_units<float>},
          {norm_units<bf16>, norm_units<float>},
          {convert_units<bf16>, convert_units<float>},
          {embed_units<bf16>, embed_units<float>},
          {append_units<bf16>, append_units<float>},
          {attend_units<bf16>, attend_units<float>},
          {merge_units<bf16>, merge_units<float>},
          {logits_units<bf16>, logits_units<float>},
          sample_units,
          route_units,
          {grouped_gated_units<bf16>, grouped_gated_units<float>},
          {grouped_linear_units<bf16>, grouped_linear_units<float>},
          read_units,
          {multiply_units<bf16>, multiply_units<float>}};
}

}  // namespace cadenza::CADENZA_ISA
