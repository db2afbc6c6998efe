#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cadenza {

extern const KernelTable scalar_kernels;
#if defined(__x86_64__)
extern const KernelTable avx512_bf16_kernels, avx512_kernels, avx2_kernels;
#elif defined(__aarch64__)
extern const KernelTable neon_bf16_kernels, neon_kernels;
#endif

namespace {

struct Candidate {
  const KernelTable* table;
  bool can_run;
};

#if defined(__x86_64__)
std::vector<Candidate> candidates() {
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  return {{&avx512_bf16_kernels, bf16},
          {&avx512_kernels, avx512},
          {&avx2_kernels, avx2},
          {&scalar_kernels, true}};
}
#elif defined(__aarch64__)
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  return (getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof(present);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &present, &size, nullptr, 0) == 0 && present;
#else
  return false;
#endif
}
std::vector<Candidate> candidates() {
  return {{&neon_bf16_kernels, has_bf16()}, {&neon_kernels, true}, {&scalar_kernels, true}};
}
#else
std::vector<Candidate> candidates() { return {{&scalar_kernels, true}}; }
#endif

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates()) {
    if (candidate.can_run) names.push_back(candidate.table->isa);
  }
  return names;
}

const KernelTable& kernels_for(const std::string& name) {
  std::string choices;
  for (const Candidate& candidate : candidates()) {
    if (!candidate.can_run) continue;
    if (name.empty() || name == candidate.table->isa) return *candidate.table;
    choices += (choices.empty() ? "" : ", ") + std::string(candidate.table->isa);
  }
  throw std::invalid_argument("CADENZA_CPU_ISA is '" + name +
                              "'; this machine can run: " + choices);
}

const KernelTable& kernels() {
  static const KernelTable& chosen = [&]() -> const KernelTable& {
    const char* name = std::getenv("CADENZA_CPU_ISA");
    return kernels_for(name == nullptr ? "" : name);
  }();
  return chosen;
}

}  // namespace cadenza
