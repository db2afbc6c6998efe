#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cadenza {

extern const KernelTable scalar_kernels;
extern const IntegerKernels int8_scalar_kernels;
#if defined(__x86_64__)
extern const KernelTable avx512_bf16_kernels, avx512_kernels, avx2_kernels;
extern const IntegerKernels int8_avx512_vnni_kernels, int8_avx2_kernels;
#ifndef CADENZA_WITHOUT_INT8_AVX_VNNI  // a compiler that does not know the instructions
extern const IntegerKernels int8_avx_vnni_kernels;
#endif
#elif defined(__aarch64__)
extern const KernelTable neon_bf16_kernels, neon_kernels;
extern const IntegerKernels int8_neon_dotprod_kernels, int8_neon_kernels;
#endif

namespace {

struct Candidate {
  const KernelTable* table;
  bool can_run;
};

struct IntegerCandidate {
  const IntegerKernels* table;
  bool can_run;
};

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
// By cpuid, because older compilers do not know these names.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}
#ifndef CADENZA_WITHOUT_INT8_AVX_VNNI
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif
// Whether vdpbf16ps multiplies faster than widening to float32 and two fused multiply-adds do. On
// Zen 5 it has twice their rate; on Intel, measured on Granite Rapids, half of it.
bool has_fast_bf16() {
  unsigned a, b, c, d;
  const bool is_intel = __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx &&
                        c == signature_INTEL_ecx && d == signature_INTEL_edx;
  return !is_intel;
}
std::vector<Candidate> candidates() {
  const bool avx2 = has_avx2(), avx512 = has_avx512();
  const Candidate bf16 = {&avx512_bf16_kernels, avx512 && __builtin_cpu_supports("avx512bf16")};
  const Candidate widened = {&avx512_kernels, avx512};
  const bool bf16_first = has_fast_bf16();
  return {bf16_first ? bf16 : widened,
          bf16_first ? widened : bf16,
          {&avx2_kernels, avx2},
          {&scalar_kernels, true}};
}
// VNNI is implied neither by AVX-512 nor by its bf16 instructions.
std::vector<IntegerCandidate> integer_candidates() {
  const bool avx2 = has_avx2() && has_f16c();
  return {{&int8_avx512_vnni_kernels, has_avx512() && __builtin_cpu_supports("avx512vnni")},
#ifndef CADENZA_WITHOUT_INT8_AVX_VNNI
          {&int8_avx_vnni_kernels, avx2 && has_avx_vnni()},
#endif
          {&int8_avx2_kernels, avx2},
          {&int8_scalar_kernels, true}};
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
bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kHwcapAsimdDp = 1ul << 20;
  return (getauxval(AT_HWCAP) & kHwcapAsimdDp) != 0;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof(present);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &present, &size, nullptr, 0) == 0 && present;
#else
  return false;
#endif
}
std::vector<Candidate> candidates() {
  return {{&neon_bf16_kernels, has_bf16()}, {&neon_kernels, true}, {&scalar_kernels, true}};
}
std::vector<IntegerCandidate> integer_candidates() {
  return {{&int8_neon_dotprod_kernels, has_dotprod()},
          {&int8_neon_kernels, true},
          {&int8_scalar_kernels, true}};
}
#else
std::vector<Candidate> candidates() { return {{&scalar_kernels, true}}; }
std::vector<IntegerCandidate> integer_candidates() { return {{&int8_scalar_kernels, true}}; }
#endif

bool has_bf16_instructions(const std::string& isa) {
  return isa.find("_bf16") != std::string::npos;
}

// A variable of the environment; empty if it is not set.
std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Bits of an ISA's vectors; 0 for scalar kernels.
int vector_bits(const std::string& isa) {
  if (isa.rfind("avx512", 0) == 0) return 512;
  if (isa.rfind("avx", 0) == 0) return 256;
  return isa.rfind("neon", 0) == 0 ? 128 : 0;
}

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
  static const KernelTable* const chosen = &kernels_for(environment("CADENZA_CPU_ISA"));
  return *chosen;
}

const KernelTable& portable_kernels() {
  static const KernelTable* const chosen = [] {
    const KernelTable* first = &kernels();
    if (!has_bf16_instructions(first->isa)) return first;
    for (const Candidate& candidate : candidates()) {
      if (candidate.can_run && !has_bf16_instructions(candidate.table->isa)) return candidate.table;
    }
    return &scalar_kernels;
  }();
  return *chosen;
}

std::vector<std::string> available_integer_isas() {
  std::vector<std::string> names;
  for (const IntegerCandidate& candidate : integer_candidates()) {
    if (candidate.can_run) names.push_back(candidate.table->isa);
  }
  return names;
}

const IntegerKernels& integer_kernels_for(const std::string& name, const std::string& isa) {
  std::string choices;
  for (const IntegerCandidate& candidate : integer_candidates()) {
    if (!candidate.can_run) continue;
    const std::string own = candidate.table->isa;
    if (own == name) return *candidate.table;
    if (name.empty() && vector_bits(own) <= vector_bits(isa)) return *candidate.table;
    choices += (choices.empty() ? "" : ", ") + own;
  }
  throw std::invalid_argument("CADENZA_CPU_INTEGER_ISA is '" + name +
                              "'; this machine can run: " + choices);
}

const IntegerKernels& integer_kernels() {
  static const IntegerKernels* const chosen =
      &integer_kernels_for(environment("CADENZA_CPU_INTEGER_ISA"), kernels().isa);
  return *chosen;
}

}  // namespace cadenza
