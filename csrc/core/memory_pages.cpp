#include "core/memory_pages.h"

#include <cstdint>

#include "core/topology.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cadenza {

#if defined(__linux__)

namespace {

// Of linux/mempolicy.h, which not every system has.
constexpr int kPolicyDefault = 0, kPolicyInterleave = 3;
constexpr unsigned kMovePages = 1 << 1;
constexpr size_t kBitsOfWord = 8 * sizeof(unsigned long);

bool has_own_policy() {
  int policy = kPolicyDefault;
  const long failed = syscall(SYS_get_mempolicy, &policy, nullptr, 0ul, nullptr, 0ul);
  return failed == 0 && policy != kPolicyDefault;
}

bool interleave(char* begin, size_t bytes, const std::vector<int>& nodes) {
  std::vector<unsigned long> mask(size_t(nodes.back()) / kBitsOfWord + 1);
  for (int node : nodes) mask[size_t(node) / kBitsOfWord] |= 1ul << size_t(node) % kBitsOfWord;
  // One more than the bits, since the kernel takes one off.
  const unsigned long bits = mask.size() * kBitsOfWord + 1;
  return syscall(SYS_mbind, begin, bytes, kPolicyInterleave, mask.data(), bits, kMovePages) == 0;
}

}  // namespace

bool place_pages(void* data, size_t bytes, const std::vector<int>& nodes) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
  if (end <= begin) return false;
  char* first = static_cast<char*>(data) + (begin - at);
  const bool is_spread = nodes.size() > 1 && interleave(first, end - begin, nodes);
  madvise(first, end - begin, MADV_HUGEPAGE);
  return is_spread;
}

const std::vector<int>& nodes_to_spread_over() {
  static const std::vector<int> nodes = [] {
    std::vector<int> found = nodes_of_cpus("", allowed_cpus());
    if (found.size() < 2 || has_own_policy()) found.clear();
    return found;
  }();
  return nodes;
}

#else

bool place_pages(void*, size_t, const std::vector<int>&) { return false; }

const std::vector<int>& nodes_to_spread_over() {
  static const std::vector<int> nodes;
  return nodes;
}

#endif

}  // namespace cadenza
