// How many threads this process may use.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/pool.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cadenza {

namespace {

constexpr int kMaxThreads = 256;

int visible_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#elif defined(__APPLE__)
  int cores = 0;
  size_t size = sizeof(cores);
  if (sysctlbyname("hw.perflevel0.logicalcpu", &cores, &size, nullptr, 0) == 0) return cores;
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Quota over period of a cgroup v2 file ("200000 100000") or a v1 pair; 0 where there is no limit.
double read_quota(const char* quota_path, const char* period_path) {
  double quota = 0, period = 0;
  std::FILE* file = std::fopen(quota_path, "r");
  if (file == nullptr) return 0;
  int found = std::fscanf(file, "%lf %lf", &quota, &period);
  std::fclose(file);
  if (found == 1 && period_path != nullptr) {
    file = std::fopen(period_path, "r");
    if (file == nullptr) return 0;
    found += std::fscanf(file, "%lf", &period);
    std::fclose(file);
  }
  return found == 2 && quota > 0 && period > 0 ? quota / period : 0;
}

int cgroup_cores() {
  double quota = read_quota("/sys/fs/cgroup/cpu.max", nullptr);
  if (quota == 0) {
    quota =
        read_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  }
  return quota == 0 ? kMaxThreads : std::max(1, static_cast<int>(quota + 0.5));
}

}  // namespace

int default_num_threads() {
  if (const char* text = std::getenv("CADENZA_NUM_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    long wanted = std::strtol(text, &end, 10);
    if (*end != '\0' || wanted < 1 || wanted > kMaxThreads) {
      throw std::invalid_argument("CADENZA_NUM_THREADS is '" + std::string(text) +
                                  "'; it must be a whole number from 1 to 256");
    }
    return static_cast<int>(wanted);
  }
  return std::clamp(std::min(visible_cores(), cgroup_cores()), 1, kMaxThreads);
}

Executor& executor() {
  // Never destroyed: workers may outlive static destructors.
  static Executor* const instance = new Executor(default_num_threads());
  return *instance;
}

}  // namespace cadenza
