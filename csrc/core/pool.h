// A small pool that shares one job's units between the caller and sleeping workers.
//
// Each thread starts with an even share of neighbouring units, the same share of every job of the
// same size, so that what one operation wrote lies in the cache of the core that reads it next. It
// claims them in ascending chunks; one that is done takes from the ends of the others' shares, so a
// core that is stolen for a while delays only what it holds. Which thread computes a unit never
// changes its result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "core/trail.h"

namespace cadenza {

// What one thread brings to a job.
struct alignas(64) Worker {
  int index;
  Arena& arena;
  int64_t share_end = 0;  // of the units that this thread began with
  Upcoming next{};        // what it will most likely read when this job is done
};

// Computes units [begin, end). `context` is the job's own.
using UnitFn = void (*)(const void* context, int64_t begin, int64_t end, Worker& worker);

struct Job {
  UnitFn run;
  const void* context;
  int64_t units;
  int64_t max_chunk;  // most units claimed at once
  Weight next{};      // that will most likely be read next; empty: as the last job said
};

// The units [begin, end) of a thread's share that nobody has claimed; the owner takes from the
// front, all others from the back.
class alignas(64) Share {
 public:
  struct Units {
    int64_t begin, end;
    bool empty() const { return end <= begin; }
  };

  void open(Units units);
  // At most half of what is left and at most `most`; empty when nothing is left.
  Units claim_front(int64_t most);
  Units claim_back(int64_t most);

 private:
  std::atomic<uint64_t> left_{0};  // begin in the upper half, end in the lower
};

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Scratch of one thread, for work that stays on the caller.
  Arena& arena(int index) { return *arenas_[index]; }

  // Runs a job on all threads and returns when it is done; rethrows a failed allocation.
  void run(const Job& job);

 private:
  void work(Worker& worker);
  void run_units(Share::Units units, Worker& worker);
  void claim_units(Worker& worker);
  void serve(int index);
  bool await_job(uint64_t seen, Upcoming& next);
  void open(const Job& job);
  void close(Upcoming& next);
  Share::Units share_of(int index) const;

  const int num_threads_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<Worker> workers_;  // the caller's is the first
  std::vector<Share> shares_;
  std::vector<std::thread> threads_;
  Job job_{};

  alignas(64) std::atomic<uint64_t> generation_{0};
  std::atomic<uint64_t> open_generation_{0};
  alignas(64) std::atomic<int> active_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> out_of_memory_{false};
  std::atomic<bool> stopping_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

// Hands out pools: one job at a time on the workers; a concurrent caller runs alone.
class Executor {
 public:
  explicit Executor(int num_threads);

  // Exclusive use of the pool for one operation, or of the calling thread where it is taken.
  class Lease {
   public:
    explicit Lease(Executor& executor);
    ~Lease();
    int num_threads() const;
    Arena& scratch() { return *scratch_; }
    // The weight that will most likely be read after this one.
    Weight next_after(const Weight& weight);
    // Shares the units between all threads, or keeps them here when they are not worth waking for.
    void run(const Job& job, bool worth_sharing);

   private:
    Executor& executor_;
    std::unique_lock<std::mutex> lock_;
    std::unique_ptr<Arena> own_, own_unit_;
    Arena* scratch_;
    Arena* unit_arena_;
    uint64_t float_state_;
  };

  int num_threads() const { return pool_.num_threads(); }

 private:
  Pool pool_;
  WeightTrail trail_;
  std::mutex mutex_;
  Arena scratch_;
};

// Threads to use: CADENZA_NUM_THREADS, or the affinity mask limited by the cgroup's quota.
int default_num_threads();
// Cores that the control groups of this process allow, rounded, by the files below `root`; at least
// 1, and 256 where nothing limits them.
int cgroup_cores(const std::string& root);
// The process-wide executor, made at first use.
Executor& executor();

// Denormals are flushed on every thread alike, so no bit depends on who computes.
uint64_t enter_float_state();
void leave_float_state(uint64_t saved);

}  // namespace cadenza
