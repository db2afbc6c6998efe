// Attention over KV in f32.
#include "cuda/attention_block.h"

namespace cadenza::cuda {

void attend_f32(const Attention& a, const Pieces& pieces) {
  if (a.key_size <= 64) {
    attend_with<F32Kv<64, 64, 32, 2>, row_groups(64), 1, 4>(a, pieces);
  } else if (a.key_size <= 128) {
    attend_with<F32Kv<128, 128, 16, 2>, row_groups(128), 1, 4>(a, pieces);
  } else if (a.key_size <= 256) {
    attend_with<F32Kv<256, 256, 16, 1>, row_groups(256), 2, 4>(a, pieces);
  } else {
    attend_with<F32Kv<512, 512, 16, 1>, row_groups(512), 4, 4>(a, pieces);
  }
}

}  // namespace cadenza::cuda
