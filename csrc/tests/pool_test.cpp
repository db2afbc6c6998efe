// The thread pool, weight prefetch, the machine's cores and memory nodes, cgroup quotas, and results
// independent of the order of claims.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/memory_pages.h"
#include "core/topology.h"
#include "tests/check.h"
#include "tests/data.h"

namespace cadenza::tests {
namespace {

struct Counts {
  std::vector<std::atomic<int>> done;
  int slow_worker;  // delayed, so that the others finish first and steal from its share
  explicit Counts(int64_t units, int slow) : done(size_t(units)), slow_worker(slow) {}
};

void count_units(const void* context, int64_t begin, int64_t end, Worker& worker) {
  auto& counts = *const_cast<Counts*>(static_cast<const Counts*>(context));
  if (worker.index == counts.slow_worker) {
    for (volatile int i = 0; i < 20000; i++) {
    }
  }
  for (int64_t unit = begin; unit < end; unit++) counts.done[size_t(unit)]++;
}

TEST(every_unit_is_computed_exactly_once) {
  for (const auto& executor : context.executors) {
    for (int64_t units : {1, 2, 3, 5, 31, 64, 257, 1000}) {
      for (int64_t chunk : {1, 7, 32}) {
        for (int slow = 0; slow < executor->num_threads(); slow++) {
          Counts counts(units, slow);
          Executor::Lease lease(*executor);
          lease.run({count_units, &counts, units, chunk}, true);
          for (const auto& times : counts.done) CHECK(times.load() == 1);
        }
      }
    }
  }
}

TEST(a_share_is_claimed_from_both_ends_until_it_is_empty) {
  Share share;
  share.open({10, 20});
  Share::Units front = share.claim_front(32), back = share.claim_back(2);
  CHECK(front.begin == 10 && front.end == 15);
  CHECK(back.begin == 18 && back.end == 20);
  int64_t left = 0;
  for (;;) {
    Share::Units units = share.claim_back(1);
    if (units.empty()) break;
    left += units.end - units.begin;
  }
  CHECK(left == 3);
  CHECK(share.claim_front(1).empty());
}

TEST(recorded_blocks_are_prefetched_in_chunks_once_and_forgotten_with_their_layer) {
  auto blocks = std::make_unique<UpcomingBlocks>();
  std::vector<char> memory(8 << 10);
  const char *first = memory.data(), *second = first + (4 << 10);
  const char* none = blocks->take_chunk();
  blocks->start(3, 2 * UpcomingBlocks::kChunk);
  blocks->record(second);
  blocks->start(3, 2 * UpcomingBlocks::kChunk);
  blocks->record(first);
  for (const char* block : {second, first}) {
    CHECK(blocks->take_chunk() == block);
    CHECK(blocks->take_chunk() == block + UpcomingBlocks::kChunk);
  }
  CHECK(blocks->take_chunk() == none);
  blocks->record(first);
  blocks->start(4, UpcomingBlocks::kChunk);
  CHECK(blocks->take_chunk() == none);
  // The last chunk of a block ends with it; a smaller block is one chunk.
  blocks->start(5, 2 * UpcomingBlocks::kChunk + 64);
  blocks->record(first);
  for (int64_t at : {int64_t(0), UpcomingBlocks::kChunk, UpcomingBlocks::kChunk + 64}) {
    CHECK(blocks->take_chunk() == first + at);
  }
  CHECK(blocks->take_chunk() == none);
  blocks->start(6, 320);
  blocks->record(first);
  CHECK(blocks->take_chunk() == first);
  CHECK(blocks->take_chunk() == none);
  blocks->start(7, UpcomingBlocks::kChunk);
  for (int i = 0; i < 10000; i++) blocks->record(first);
  int taken = 0;
  while (blocks->take_chunk() != none) taken++;
  CHECK(taken > 0 && taken < 10000);
}

// A weight at a made-up address, which is never read.
Weight weight_at(int64_t address, int64_t panels) {
  return {reinterpret_cast<const char*>(address), panels, 1 << 12};
}

TEST(the_predictor_returns_the_weight_that_followed_last_time) {
  const Weight first = weight_at(1 << 20, 4), second = weight_at(2 << 20, 5);
  const Weight third = weight_at(3 << 20, 6);
  NextWeightPredictor predictor;
  for (const Weight& each : {first, second, third}) {
    CHECK(predictor.record_and_predict(each).data == nullptr);
  }
  CHECK(predictor.record_and_predict(first).data == second.data);
  // The order changes; the latest counts.
  CHECK(predictor.record_and_predict(third).panels == first.panels);
  CHECK(predictor.record_and_predict(first).data == third.data);
}

TEST(each_thread_prefetches_its_own_share_of_the_next_weight) {
  const Weight weight = weight_at(1 << 20, 7);
  const char* end = weight.data;
  for (int index = 0; index < 3; index++) {
    PrefetchRange mine = prefetch_range(weight, index, 3);
    CHECK(mine.at == end);
    end = mine.end;
  }
  CHECK(end == weight.data + 7 * weight.panel_bytes);
  PrefetchRange bounded = prefetch_range(weight_at(1 << 20, 1 << 10), 1, 2);
  CHECK(bounded.end - bounded.at == kMaxPrefetchBytes);
  CHECK(prefetch_range(Weight{}, 1, 2).empty());
}

struct Expected {
  std::atomic<bool> is_wrong{false};
  int64_t units, threads;
  Weight next;
};

void check_worker(const void* context, int64_t begin, int64_t, Worker& worker) {
  auto& expected = *const_cast<Expected*>(static_cast<const Expected*>(context));
  const Weight& next = expected.next;
  const char* first = next.data + next.panels * worker.index / expected.threads * next.panel_bytes;
  if (worker.prefetch.at != first) expected.is_wrong = true;
  const int64_t share_end = expected.units * (worker.index + 1) / expected.threads;
  if (worker.share_end != share_end) expected.is_wrong = true;
  if (begin >= expected.units) expected.is_wrong = true;
}

TEST(a_worker_has_the_end_of_its_share_and_its_prefetch_range) {
  for (const auto& executor : context.executors) {
    if (executor->num_threads() == 1) continue;
    for (int64_t units : {2, 9, 100}) {
      const int64_t threads = std::min<int64_t>(units, executor->num_threads());
      Expected expected{{false}, units, threads, weight_at(1 << 20, units)};
      Executor::Lease lease(*executor);
      lease.run({check_worker, &expected, units, 4, expected.next}, true);
      CHECK(!expected.is_wrong);
    }
  }
}

struct Arrivals {
  std::atomic<int64_t> count{0};
  std::atomic<bool> is_late{false}, has_outsider{false};
  int64_t units;
};

// Each unit waits for all others, so that no thread computes two of them.
void arrive(const void* context, int64_t begin, int64_t, Worker& worker) {
  auto& arrivals = *const_cast<Arrivals*>(static_cast<const Arrivals*>(context));
  if (worker.index >= arrivals.units) arrivals.has_outsider = true;
  arrivals.count++;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (arrivals.count.load() < arrivals.units && !arrivals.is_late.load()) {
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() > deadline) arrivals.is_late = true;
  }
  CHECK(begin < arrivals.units);
}

// Threads fall asleep between the jobs, as there are more than cores: each must be woken, by others
// than the caller too.
TEST(a_job_reaches_as_many_threads_as_it_has_units_and_no_others) {
  Executor executor(24);
  for (int64_t units : {24, 3, 24, 10, 2, 9, 24}) {
    Arrivals arrivals;
    arrivals.units = units;
    Executor::Lease lease(executor);
    lease.run({arrive, &arrivals, units, 1}, true);
    CHECK(!arrivals.is_late && !arrivals.has_outsider && arrivals.count.load() == units);
  }
}

TEST(many_more_threads_than_cores_compute_every_unit_exactly_once) {
  for (int threads : {16, 64}) {
    Executor executor(threads);
    for (int64_t units : {2, 15, 64, 65, 1000}) {
      Counts counts(units, threads - 1);
      Executor::Lease lease(executor);
      lease.run({count_units, &counts, units, 4}, true);
      for (const auto& times : counts.done) CHECK(times.load() == 1);
    }
  }
}

// A temporary root with /proc and /sys files, removed by the destructor.
class Files {
 public:
  Files() {
    std::string name = (std::filesystem::temp_directory_path() / "cadenza-XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~Files() { std::filesystem::remove_all(root_); }
  Files& with(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ + path).substr(0, (root_ + path).rfind('/')));
    std::ofstream(root_ + path) << text;
    return *this;
  }
  int cores() const { return cgroup_cores(root_); }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

TEST(the_cgroup_quota_gives_the_number_of_cores) {
  const std::string limit = "/sys/fs/cgroup/cpu.max";
  CHECK(Files().cores() == 256);
  CHECK(Files().with(limit, "max 100000").cores() == 256);
  CHECK(Files().with(limit, "garbage").cores() == 256);
  CHECK(Files().with(limit, "200000 100000").cores() == 2);
  CHECK(Files().with(limit, "350000 100000").cores() == 4);
  CHECK(Files().with(limit, "1000 100000").cores() == 1);
  const std::string old = "/sys/fs/cgroup/cpu/cpu.cfs_";
  CHECK(Files().with(old + "quota_us", "300000").with(old + "period_us", "100000").cores() == 3);
  CHECK(Files().with(old + "quota_us", "-1").with(old + "period_us", "100000").cores() == 256);
}

// A systemd service or slice has its quota on an ancestor of the process's cgroup.
TEST(the_quotas_of_all_ancestor_cgroups_apply) {
  const std::string groups = "/proc/self/cgroup", mount = "/sys/fs/cgroup";
  Files nested;
  nested.with(groups, "1:name=systemd:/x\n0::/system/server\n").with(mount + "/x/cpu.max", "1 1");
  CHECK(nested.cores() == 256);
  CHECK(nested.with(mount + "/system/cpu.max", "500000 100000").cores() == 5);
  CHECK(nested.with(mount + "/system/server/cpu.max", "300000 100000").cores() == 3);
  CHECK(nested.with(mount + "/cpu.max", "200000 100000").cores() == 2);
  Files old;
  old.with(groups, "4:cpu,cpuacct:/box\n").with(mount + "/cpu/box/cpu.cfs_quota_us", "400000");
  CHECK(old.with(mount + "/cpu/box/cpu.cfs_period_us", "100000").cores() == 4);
  for (const char* hostile : {"0::/../../etc", "0::", "::::", "0::/", ":", "0::relative"}) {
    CHECK(Files().with(groups, hostile).cores() == 256);
  }
}

using Numbers = std::vector<int>;

TEST(a_list_of_numbers_ends_at_what_is_no_number) {
  CHECK(numbers_of_list("0-2,8\n") == (Numbers{0, 1, 2, 8}));
  CHECK(numbers_of_list("5") == Numbers{5});
  CHECK(numbers_of_list("").empty() && numbers_of_list("\n").empty());
  CHECK(numbers_of_list("1,x,2") == Numbers{1});
  CHECK(numbers_of_list("3-1,4") == Numbers{4});
  CHECK(numbers_of_list("2-") == Numbers{2});
  CHECK(numbers_of_list("-3").empty());
  CHECK(numbers_of_list("1,0-99999999999").size() == 1);
}

Files& with_siblings(Files& files, int cpu, const std::string& list) {
  const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
  return files.with(folder + "/topology/thread_siblings_list", list + "\n");
}

TEST(there_is_a_thread_for_each_core_and_not_for_each_of_its_two_cpus) {
  Files paired, adjacent;
  for (int cpu = 0; cpu < 8; cpu++) {
    with_siblings(paired, cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
    with_siblings(adjacent, cpu, std::to_string(cpu & ~1) + "-" + std::to_string(cpu | 1));
  }
  for (const Files* files : {&paired, &adjacent}) {
    CHECK(threads_of_cpus(files->root(), {0, 1, 2, 3, 4, 5, 6, 7}) == 4);
  }
  // The mask has one CPU of each core, or so few cores that their second CPUs are of use.
  CHECK(threads_of_cpus(paired.root(), {4, 5, 6, 7}) == 4);
  CHECK(threads_of_cpus(paired.root(), {0, 1, 2, 4, 5, 6}) == 6);
  CHECK(threads_of_cpus(adjacent.root(), {0, 1}) == 2);
  // Efficiency cores have no second CPU, and count.
  Files hybrid;
  for (int cpu = 0; cpu < 8; cpu++) {
    with_siblings(hybrid, cpu, std::to_string(cpu & ~1) + "-" + std::to_string(cpu | 1));
  }
  for (int cpu = 8; cpu < 12; cpu++) with_siblings(hybrid, cpu, std::to_string(cpu));
  CHECK(threads_of_cpus(hybrid.root(), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}) == 8);
  CHECK(threads_of_cpus(Files().root(), {0, 1, 2, 3, 4}) == 5);
}

TEST(memory_is_on_the_nodes_of_the_cpus_that_have_memory_for_this_process) {
  const std::string folder = "/sys/devices/system/node/";
  Files files;
  files.with(folder + "online", "0-2\n").with(folder + "node0/cpulist", "0-3\n");
  files.with(folder + "node1/cpulist", "4-7\n").with(folder + "node2/cpulist", "\n");
  CHECK(nodes_of_cpus(files.root(), {0, 1, 6}) == (Numbers{0, 1}));
  CHECK(nodes_of_cpus(files.root(), {4, 5}) == Numbers{1});
  files.with("/proc/self/status", "Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-2\nEnd:\t1\n");
  CHECK(nodes_of_cpus(files.root(), {0, 6}) == (Numbers{0, 1}));
  files.with(folder + "has_memory", "0,2\n");
  CHECK(nodes_of_cpus(files.root(), {0, 6}) == Numbers{0});
  files.with("/proc/self/status", "Name:\tx\nMems_allowed_list:\t1\n");
  CHECK(nodes_of_cpus(files.root(), {0, 6}).empty());
  CHECK(nodes_of_cpus(Files().root(), {0}).empty());
}

#if defined(__linux__)
// The memory policy at an address, or -1 where the system does not say.
int policy_at(const void* data) {
  constexpr unsigned long kOfAddress = 1 << 1;
  int policy = -1;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0ul, data, kOfAddress) == 0 ? policy : -1;
}

TEST(memory_that_is_spread_keeps_its_content_and_has_the_policy_that_is_said) {
  constexpr size_t kBytes = 8 << 20;
  Aligned memory(kBytes);
  char* data = static_cast<char*>(memory.data());
  for (size_t i = 0; i < kBytes; i++) data[i] = char(i * 7);
  const int before = policy_at(data + kBytes / 2);
  CHECK(!place_pages(data, kBytes, {}) && !place_pages(data, kBytes, {0}));
  CHECK(policy_at(data + kBytes / 2) == before);
  CHECK(!place_pages(data + 1, 100, {0, 0}));  // no whole page
  const bool is_spread = place_pages(data, kBytes, {0, 0});
  constexpr int kInterleave = 3;
  CHECK(policy_at(data + kBytes / 2) == (is_spread ? kInterleave : before));
  for (size_t i = 0; i < kBytes; i++) CHECK(data[i] == char(i * 7));
}
#endif

// All logits are equal: the lowest id is selected although its panel is computed last.
TEST(ties_go_to_the_lowest_id_when_panels_are_computed_in_reverse) {
  constexpr int64_t kVocab = 4 * kPanel, kWidth = 16;
  std::vector<float> x(kWidth, 1.0f);
  Aligned packed(packed_bytes(kVocab, kWidth, DType::kF32, false));
  std::vector<float> rows(size_t(kVocab * kWidth), 0.5f);
  pack(*context.executors[0],
       {{{rows.data(), DType::kF32, kVocab, kWidth}}, kWidth, packed.data(), DType::kF32, false});
  LinearTask product{1, kVocab, kWidth, x.data(), packed.data(), nullptr, nullptr, nullptr, false};
  RowBest best{-__builtin_inff(), 0x7fffffff, 0};
  float* kept = nullptr;
  LogitsTask task{product, {}, &best, &kept};
  Arena arena;
  Worker worker{0, arena};
  UnitFn logits = context.kernels.logits[static_cast<int>(DType::kF32)];
  for (int64_t panel = 3; panel >= 0; panel--) logits(&task, panel, panel + 1, worker);
  CHECK(best.id == 0);
}

}  // namespace
}  // namespace cadenza::tests
