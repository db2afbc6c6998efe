// How the emulation's model of cublasLt behaves.
#pragma once

namespace cadenza::cuda {

enum class FakeCublasLt : int {
  kAbsent = 0,
  kSound = 1,
  kBackward = 2,  // unsplit, but in another order than our kernels
};

void behave(FakeCublasLt as);

}  // namespace cadenza::cuda
