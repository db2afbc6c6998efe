#include "core/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
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

enum class TileSupport { kNone, kNotEnabled, kNotPermitted, kGranted };

// The state components of tile registers in XCR0 and in the kernel's numbering.
constexpr unsigned kTileState = 3u << 17;
constexpr unsigned long kTileData = 18;

bool has_amx() {
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmx) == kAmx;
}
bool system_saves_tiles() {
  unsigned a, b, c, d, low, high;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c >> 27 & 1) == 0) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}
bool is_permitted_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
TileSupport tile_support() {
  static const TileSupport support = [] {
    if (!has_amx()) return TileSupport::kNone;
    if (!system_saves_tiles()) return TileSupport::kNotEnabled;
    return is_permitted_tiles() ? TileSupport::kGranted : TileSupport::kNotPermitted;
  }();
  return support;
}
const char* refusal_of(TileSupport support) {
  switch (support) {
    case TileSupport::kNotEnabled:
      return "the CPU has AMX, but the system or its hypervisor does not enable it";
    case TileSupport::kNotPermitted:
      return "the CPU has AMX, but the system refused this process its use (arch_prctl)";
    case TileSupport::kNone:
    case TileSupport::kGranted:
      return "";
  }
  return "";
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
  return names_of({{"amx", avx512 && tile_support() == TileSupport::kGranted},
                   bf16_first ? bf16 : widened,
                   bf16_first ? widened : bf16,
                   {"avx2", avx2},
                   {"scalar", true}});
}
// VNNI is implied neither by AVX-512 nor by its bf16 instructions.
std::vector<std::string> integer_isas_of_cpu() {
  const bool avx2 = has_avx2() && has_f16c();
  const bool vnni = has_avx512() && __builtin_cpu_supports("avx512vnni");
  return names_of({{"amx", vnni && tile_support() == TileSupport::kGranted},
                   {"avx512_vnni", vnni},
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
  return isa.find("_bf16") != std::string::npos || has_tiles(isa);
}

bool has_tiles(const std::string& isa) { return isa.rfind("amx", 0) == 0; }

std::string refusal_of_tiles() {
#if defined(__x86_64__)
  return refusal_of(tile_support());
#else
  return "";
#endif
}

}  // namespace cadenza
