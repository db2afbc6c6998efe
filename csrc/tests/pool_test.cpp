// The thread pool, weight prefetch, cgroup quotas, and results independent of the order of claims.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>

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
      Expected expected{{false}, units, executor->num_threads(), weight_at(1 << 20, units)};
      Executor::Lease lease(*executor);
      lease.run({check_worker, &expected, units, 4, expected.next}, true);
      CHECK(!expected.is_wrong);
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
