// The number of threads: environment, cores in the affinity mask and cgroup CPU quota.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/pool.h"
#include "core/topology.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cadenza {

namespace {

constexpr int kMaxThreads = 256;

int visible_cores() {
#if defined(__APPLE__)
  int cores = 0;
  size_t size = sizeof(cores);
  if (sysctlbyname("hw.perflevel0.logicalcpu", &cores, &size, nullptr, 0) == 0) return cores;
#endif
  const std::vector<int> cpus = allowed_cpus();
  if (!cpus.empty()) return threads_of_cpus("", cpus);
  return static_cast<int>(std::thread::hardware_concurrency());
}

// The files with the CPU quota in one version of cgroups.
struct QuotaFiles {
  const char *mount, *quota, *period;  // v2 has both in one file, and no `period`
};
constexpr QuotaFiles kVersion1{"/sys/fs/cgroup/cpu", "/cpu.cfs_quota_us", "/cpu.cfs_period_us"};
constexpr QuotaFiles kVersion2{"/sys/fs/cgroup", "/cpu.max", nullptr};

// Quota of one group in cores; infinity without a limit ("max 100000", "-1", or no file).
double quota_of(const std::string& group, const QuotaFiles& files) {
  std::string limit = read_text(group + files.quota);
  if (files.period != nullptr) limit += " " + read_text(group + files.period);
  char* rest = nullptr;
  const long long quota = std::strtoll(limit.c_str(), &rest, 10);
  const long long period = std::strtoll(rest, nullptr, 10);
  if (quota <= 0 || period <= 0) return std::numeric_limits<double>::infinity();
  return double(quota) / double(period);
}

// The smallest quota of a group and its ancestors.
double least_quota(const std::string& mount, std::string path, const QuotaFiles& files) {
  double least = quota_of(mount, files);
  while (!path.empty() && path.find("/..") == std::string::npos) {
    least = std::min(least, quota_of(mount + path, files));
    path.resize(std::min(path.rfind('/'), path.size() - 1));
  }
  return least;
}

}  // namespace

// Groups are named in /proc/self/cgroup; in a container the mount point itself may be the group.
int cgroup_cores(const std::string& root) {
  double least = std::min(quota_of(root + kVersion1.mount, kVersion1),
                          quota_of(root + kVersion2.mount, kVersion2));
  const std::string groups = read_text(root + "/proc/self/cgroup");
  for (size_t at = 0; at < groups.size();) {
    const size_t end = std::min(groups.find('\n', at), groups.size());
    const std::string line = groups.substr(at, end - at);
    at = end + 1;
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    bool has_cpu = controllers.find(",cpu,") != std::string::npos;
    if (!has_cpu && controllers != ",,") continue;
    const QuotaFiles& files = has_cpu ? kVersion1 : kVersion2;
    least = std::min(least, least_quota(root + files.mount, line.substr(second + 1), files));
  }
  return static_cast<int>(std::clamp(least + 0.5, 1.0, double(kMaxThreads)));
}

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
  return std::clamp(std::min(visible_cores(), cgroup_cores("")), 1, kMaxThreads);
}

Executor& executor() {
  // Leaked on purpose: worker threads may outlive static destructors.
  static Executor* const instance = new Executor(default_num_threads());
  return *instance;
}

}  // namespace cadenza
