// Attention over KV in bf16.
#include "cuda/attention_block.h"

namespace cadenza::cuda {

void attend_bf16(const Attention& a, const Pieces& pieces) {
  if (a.key_size <= 64) {
    attend_with<Bf16Kv<64, 64, 64, 2>, row_groups(64), 1, 4>(a, pieces);
  } else if (a.key_size <= 128) {
    attend_with<Bf16Kv<128, 128, 64, 2>, row_groups(128), 1, 4>(a, pieces);
  } else if (a.key_size <= 256) {
    attend_with<Bf16Kv<256, 256, 32, 2>, row_groups(256), 2, 4>(a, pieces);
  } else {
    attend_with<Bf16Kv<512, 512, 16, 2>, row_groups(512), 4, 4>(a, pieces);
  }
}

}  // namespace cadenza::cuda
