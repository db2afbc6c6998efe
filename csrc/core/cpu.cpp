#include "core/cpu.h"

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
namespace {

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
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
// Whether vdpbf16ps multiplies faster than widening to float32 and two fused multiply-adds do. On
// Zen 5 it has twice their rate; on Intel, measured on Granite Rapids, half of it.
bool has_fast_bf16() {
  unsigned a, b, c, d;
  const bool is_intel = __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx &&
                        c == signature_INTEL_ecx && d == signature_INTEL_edx;
  return !is_intel;
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
#endif

struct Isa {
  const char* name;
  bool can_run;
};

std::vector<std::string> names_of(const std::vector<Isa>& isas) {
  std::vector<std::string> names;
  for (const Isa& isa : isas) {
    if (isa.can_run) names.push_back(isa.name);
  }
  return names;
}

}  // namespace

#if defined(__x86_64__)
std::vector<std::string> isas_of_cpu() {
  const bool avx2 = has_avx2(), avx512 = has_avx512();
  const Isa bf16 = {"avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16")};
  const Isa widened = {"avx512", avx512};
  const bool bf16_first = has_fast_bf16();
  return names_of({bf16_first ? bf16 : widened,
                   bf16_first ? widened : bf16,
                   {"avx2", avx2},
                   {"scalar", true}});
}
// VNNI is implied neither by AVX-512 nor by its bf16 instructions.
std::vector<std::string> integer_isas_of_cpu() {
  const bool avx2 = has_avx2() && has_f16c();
  return names_of({{"avx512_vnni", has_avx512() && __builtin_cpu_supports("avx512vnni")},
                   {"avx_vnni", avx2 && has_avx_vnni()},
                   {"avx2", avx2},
                   {"scalar", true}});
}
#elif defined(__aarch64__)
std::vector<std::string> isas_of_cpu() {
  return names_of({{"neon_bf16", has_bf16()}, {"neon", true}, {"scalar", true}});
}
std::vector<std::string> integer_isas_of_cpu() {
  return names_of({{"neon_dotprod", has_dotprod()}, {"neon", true}, {"scalar", true}});
}
#else
std::vector<std::string> isas_of_cpu() { return {"scalar"}; }
std::vector<std::string> integer_isas_of_cpu() { return {"scalar"}; }
#endif

bool has_bf16_instructions(const std::string& isa) {
  return isa.find("_bf16") != std::string::npos;
}

}  // namespace cadenza
