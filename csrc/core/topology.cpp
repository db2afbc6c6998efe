#include "core/topology.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>

#if defined(__linux__)
#include <sched.h>
#endif

namespace cadenza {

namespace {

constexpr int kMaxNumber = 1 << 16;
const char kCpus[] = "/sys/devices/system/cpu/cpu";
const char kNodes[] = "/sys/devices/system/node/";

bool has(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

bool has_any(const std::vector<int>& numbers, const std::vector<int>& others) {
  return std::any_of(others.begin(), others.end(), [&](int each) { return has(numbers, each); });
}

// The list behind `key` in /proc/self/status.
std::string status_field(const std::string& root, const std::string& key) {
  const std::string status = read_text(root + "/proc/self/status");
  const size_t at = status.find("\n" + key + ":");
  if (at == std::string::npos) return "";
  const size_t begin = status.find_first_not_of(" \t", at + key.size() + 2);
  return begin == std::string::npos ? "" : status.substr(begin, status.find('\n', begin) - begin);
}

// Removes the nodes that a list leaves out, if there is a list.
void keep_listed(std::vector<int>& nodes, const std::string& list) {
  if (list.empty()) return;
  const std::vector<int> listed = numbers_of_list(list);
  const auto is_absent = [&](int node) { return !has(listed, node); };
  nodes.erase(std::remove_if(nodes.begin(), nodes.end(), is_absent), nodes.end());
}

}  // namespace

// Without streams: a library whose C++ runtime is linked in crashes in them beside another copy of
// that runtime, such as jaxlib's.
std::string read_text(const std::string& path) {
  std::string text;
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return text;
  char part[4096];
  for (size_t n; (n = std::fread(part, 1, sizeof(part), file)) > 0;) text.append(part, n);
  std::fclose(file);
  return text;
}

std::vector<int> numbers_of_list(const std::string& text) {
  std::vector<int> numbers;
  const char* at = text.c_str();
  while (std::isdigit(static_cast<unsigned char>(*at))) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    long last = first;
    if (*end == '-' && std::isdigit(static_cast<unsigned char>(end[1]))) {
      last = std::strtol(end + 1, &end, 10);
    }
    if (first >= kMaxNumber || last >= kMaxNumber) break;
    for (long each = first; each <= last; each++) numbers.push_back(int(each));
    at = *end == ',' ? end + 1 : "";
  }
  return numbers;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
#endif
  return cpus;
}

// Two CPUs of one core share its multipliers, and a few cores read all that memory can send. Fewer
// than kMinCores do not: there the second CPU's loads add to the first's.
int threads_of_cpus(const std::string& root, const std::vector<int>& cpus) {
  int cores = 0;
  for (int cpu : cpus) {
    const std::string path = root + kCpus + std::to_string(cpu) + "/topology/thread_siblings_list";
    const std::vector<int> siblings = numbers_of_list(read_text(path));
    const auto is_earlier = [&](int each) { return each < cpu && has(cpus, each); };
    if (std::none_of(siblings.begin(), siblings.end(), is_earlier)) cores++;
  }
  return cores < kMinCores ? int(cpus.size()) : cores;
}

std::vector<int> nodes_of_cpus(const std::string& root, const std::vector<int>& cpus) {
  std::vector<int> nodes;
  for (int node : numbers_of_list(read_text(root + kNodes + "online"))) {
    const std::string path = root + kNodes + "node" + std::to_string(node) + "/cpulist";
    if (has_any(numbers_of_list(read_text(path)), cpus)) nodes.push_back(node);
  }
  keep_listed(nodes, read_text(root + kNodes + "has_memory"));
  keep_listed(nodes, status_field(root, "Mems_allowed_list"));
  return nodes;
}

}  // namespace cadenza
