// Attention over latents (multi-head latent attention): a token's only key begins with its value.
#include "cuda/attention_block.h"

namespace cadenza::cuda {

// Up to 512 values and 64 rotated elements, as DeepSeek's models have them, or up to 1024 together.
void attend_latents_bf16(const Attention& a, const Pieces& pieces) {
  if (a.key_size <= 576 && a.value_size <= 512) {
    attend_with<Bf16Kv<576, 512, 16, 2, false>, kLatentGroups, 4, 4>(a, pieces);
  } else {
    attend_with<Bf16Kv<1024, 1024, 16, 1, false>, kLatentGroups, 8, 8>(a, pieces);
  }
}

void attend_latents_f32(const Attention& a, const Pieces& pieces) {
  if (a.key_size <= 576 && a.value_size <= 512) {
    attend_with<F32Kv<576, 512, 16, 1, false>, kLatentGroups, 4, 4>(a, pieces);
  } else {
    attend_with<F32Kv<1024, 1024, 16, 1, false>, kLatentGroups, 8, 8>(a, pieces);
  }
}

}  // namespace cadenza::cuda
