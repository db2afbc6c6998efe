// A work-stealing thread pool that runs one job at a time on the caller and its worker threads.
//
// Each thread starts with an equal share of consecutive units. Jobs with equal numbers of units get
// equal shares, so a core finds what it wrote in the previous operation in its cache. A thread
// claims chunks from the front of its own share, then steals from the back of the others', so a
// preempted thread delays only the chunk it holds. Results do not depend on which thread computes a
// unit.
//
// With many cores a job must not cost more than it saves: a job of fewer units than threads leaves
// the others where they are, no line is written by all threads, and sleeping threads wake each other.
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
#include "core/arranged.h"
#include "core/prefetch.h"

namespace cadenza {

// Per-thread state passed to the kernels.
struct alignas(64) Worker {
  int index;
  Arena& arena;
  ArrangedInputs* arranged = nullptr;  // of the job; null where nothing is kept between claims
  int64_t share_end = 0;     // end of the units this thread started with
  PrefetchRange prefetch{};  // its share of the weight predicted to be read next
  UpcomingBlocks upcoming{};
};

// Computes units [begin, end); `context` is the job's.
using UnitFn = void (*)(const void* context, int64_t begin, int64_t end, Worker& worker);

struct Job {
  UnitFn run;
  const void* context;
  int64_t units;
  int64_t max_chunk;     // maximum units in one claim
  Weight next_weight{};  // predicted to be read next; empty: keep the last job's prediction
};

// The unclaimed units [begin, end) of one thread's share. The owner claims from the front, other
// threads steal from the back.
class alignas(64) Share {
 public:
  struct Units {
    int64_t begin, end;
    bool empty() const { return end <= begin; }
  };

  void open(Units units);
  // Claim half of the remaining units, at least one and at most `most`; empty when none remain.
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

  // One thread's arena; index 0 is the caller's.
  Arena& arena(int index) { return *arenas_[index]; }
  // The caller's, to run a job without the other threads.
  Worker& worker() { return workers_[0]; }

  // Runs a job on all threads, or as many as it has units, and waits for it. Throws std::bad_alloc
  // if an allocation failed in any of them.
  void run(const Job& job);

 private:
  // The generation that a thread computes, or 0.
  struct alignas(64) Joined {
    std::atomic<uint64_t> generation{0};
  };
  struct alignas(64) Sleeper {
    std::atomic<bool> is_asleep{false};
    std::mutex mutex;
    std::condition_variable wake;
  };

  void run_share(Worker& worker);
  void run_units(Share::Units units, Worker& worker);
  void claim_units(Worker& worker);
  void worker_loop(int index);
  bool wait_for_job(int index, uint64_t seen);
  void open(const Job& job);
  void close(PrefetchRange& prefetch);
  void wake(Sleeper& sleeper);
  void wake_followers(int index, uint64_t generation);
  Share::Units share_of(int index) const;

  const int num_threads_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<ArrangedInputs>> arranged_;
  std::vector<Worker> workers_;  // index 0 is the caller's
  std::vector<Share> shares_;
  std::vector<Joined> joined_;
  std::vector<Sleeper> sleepers_;
  std::vector<std::thread> threads_;
  std::atomic<bool> out_of_memory_{false};
  std::atomic<bool> stopping_{false};

  // Written by the caller alone, once for each job, so that the others' copies stay in their caches.
  alignas(64) Job job_{};
  int job_threads_ = 1;
  // The number of the job above that of its threads: waiting threads read this line only.
  alignas(64) std::atomic<uint64_t> generation_{0};
  alignas(64) std::atomic<uint64_t> open_generation_{0};
};

// Owns the process's pool. One caller at a time leases it; concurrent callers run single-threaded.
class Executor {
 public:
  explicit Executor(int num_threads);

  // Exclusive use of the pool for one operation; if it is already leased, the operation runs on the
  // calling thread alone.
  class Lease {
   public:
    explicit Lease(Executor& executor);
    ~Lease();
    int num_threads() const;
    Arena& scratch() { return *scratch_; }
    // Records that `weight` is read now and predicts the weight read after it, which may be empty.
    Weight predict_next(const Weight& weight);
    // Runs a job on all threads of the lease, or on the calling thread if it is too small.
    void run(const Job& job, bool is_parallel);

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
  NextWeightPredictor predictor_;
  std::mutex mutex_;
  Arena scratch_;
};

// CADENZA_NUM_THREADS, or the threads that the CPUs of the affinity mask can use
// (core/topology.h), capped by the cgroup CPU quota.
int default_num_threads();
// CPU quota of this process's cgroups in cores, rounded to the nearest, read from the files below
// `root`; between 1 and 256, and 256 without a quota.
int cgroup_cores(const std::string& root);
// The process-wide executor, created at first use.
Executor& executor();

// Flush denormals (FTZ and DAZ) on this thread and return the previous mode. All threads compute in
// this mode, so results do not depend on the thread.
uint64_t enter_float_state();
void leave_float_state(uint64_t saved);

}  // namespace cadenza
