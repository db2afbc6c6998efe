#include "core/pool.h"

#include <algorithm>
#include <chrono>

#include "core/tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cadenza {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerClock = 64;
constexpr int kSpinsBeforeYield = 4096;
// Threads that one thread wakes: a wake takes the one that wakes 1 to 3 us, and each level about 10.
constexpr int kWakeFanOut = 8;
// A generation is the number of a job above the number of its threads.
constexpr int kThreadBits = 16;
constexpr uint64_t kThreadMask = (uint64_t{1} << kThreadBits) - 1;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One iteration of a spin wait: prefetches a line if any is left, else pauses.
inline void relax_or_prefetch(PrefetchRange& prefetch) {
  if (prefetch.empty()) return relax();
  prefetch.prefetch_line();
}

}  // namespace

uint64_t enter_float_state() {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  constexpr unsigned kFlushToZero = 0x8040;     // FTZ and DAZ
  constexpr unsigned kDefaultControl = 0x1f80;  // every exception masked, round to nearest
  _mm_setcsr(kDefaultControl | kFlushToZero);
  return saved;
#elif defined(__aarch64__)
  uint64_t saved;
  asm volatile("mrs %0, fpcr" : "=r"(saved));
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  asm volatile("msr fpcr, %0" : : "r"(kFlushToZero));
  return saved;
#else
  return 0;
#endif
}

void leave_float_state(uint64_t saved) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(saved));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(saved));
#else
  (void)saved;
#endif
}

namespace {

uint64_t pack_units(Share::Units units) {
  return uint64_t(units.begin) << 32 | uint64_t(uint32_t(units.end));
}

Share::Units unpack_units(uint64_t packed) {
  return {int64_t(packed >> 32), int64_t(uint32_t(packed))};
}

int64_t chunk_of(Share::Units left, int64_t most) {
  return std::clamp<int64_t>((left.end - left.begin) / 2, 1, most);
}

}  // namespace

void Share::open(Units units) { left_.store(pack_units(units), std::memory_order_relaxed); }

Share::Units Share::claim_front(int64_t most) {
  uint64_t seen = left_.load(std::memory_order_relaxed);
  for (;;) {
    Units left = unpack_units(seen);
    if (left.empty()) return left;
    int64_t middle = left.begin + chunk_of(left, most);
    if (left_.compare_exchange_weak(seen, pack_units({middle, left.end}))) {
      return {left.begin, middle};
    }
  }
}

Share::Units Share::claim_back(int64_t most) {
  uint64_t seen = left_.load(std::memory_order_relaxed);
  for (;;) {
    Units left = unpack_units(seen);
    if (left.empty()) return left;
    int64_t middle = left.end - chunk_of(left, most);
    if (left_.compare_exchange_weak(seen, pack_units({left.begin, middle}))) {
      return {middle, left.end};
    }
  }
}

Pool::Pool(int num_threads)
    : num_threads_(num_threads),
      shares_(size_t(num_threads)),
      joined_(size_t(num_threads)),
      sleepers_(size_t(num_threads)) {
  for (int i = 0; i < num_threads; i++) {
    arenas_.push_back(std::make_unique<Arena>());
    arranged_.push_back(std::make_unique<ArrangedInputs>());
    workers_.push_back({i, *arenas_.back(), arranged_.back().get()});
  }
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { worker_loop(i); });
}

Pool::~Pool() {
  stopping_.store(true);
  for (Sleeper& sleeper : sleepers_) wake(sleeper);
  for (std::thread& thread : threads_) thread.join();
}

Share::Units Pool::share_of(int index) const {
  return {job_.units * index / job_threads_, job_.units * (index + 1) / job_threads_};
}

void Pool::run_share(Worker& worker) {
  worker.share_end = share_of(worker.index).end;
  worker.arranged->forget();
  if (job_.next_weight.data != nullptr) {
    worker.prefetch = prefetch_range(job_.next_weight, worker.index, job_threads_);
  }
  try {
    claim_units(worker);
  } catch (const std::bad_alloc&) {
    out_of_memory_.store(true);
  }
}

void Pool::run_units(Share::Units units, Worker& worker) {
  worker.arena.reset();
  job_.run(job_.context, units.begin, units.end, worker);
}

void Pool::claim_units(Worker& worker) {
  for (;;) {
    Share::Units mine = shares_[worker.index].claim_front(job_.max_chunk);
    if (mine.empty()) break;
    run_units(mine, worker);
  }
  for (int i = 1; i < job_threads_; i++) {
    Share& other = shares_[(worker.index + i) % job_threads_];
    for (;;) {
      Share::Units theirs = other.claim_back(job_.max_chunk);
      if (theirs.empty()) break;
      run_units(theirs, worker);
    }
  }
}

// A sleeper that saw no new generation has said before that it is asleep.
void Pool::wake(Sleeper& sleeper) {
  if (!sleeper.is_asleep.load()) return;
  { std::lock_guard<std::mutex> lock(sleeper.mutex); }
  sleeper.wake.notify_one();
}

// Each thread of a job wakes up to kWakeFanOut others, so that the caller does not wake all.
void Pool::wake_followers(int index, uint64_t generation) {
  const int threads = int(generation & kThreadMask), first = index * kWakeFanOut + 1;
  const int end = std::min(first + kWakeFanOut, threads);
  for (int i = first; i < end; i++) wake(sleepers_[size_t(i)]);
}

void Pool::open(const Job& job) {
  job_ = job;
  job_threads_ = int(std::min<int64_t>(num_threads_, job.units));
  for (int i = 0; i < job_threads_; i++) {
    shares_[i].open(share_of(i));
  }
  const uint64_t number = (generation_.load(std::memory_order_relaxed) >> kThreadBits) + 1;
  const uint64_t generation = number << kThreadBits | uint64_t(job_threads_);
  open_generation_.store(generation);
  generation_.store(generation);
  wake_followers(0, generation);
}

// On return no worker uses the job: those that joined have finished, and later ones find no open
// generation.
void Pool::close(PrefetchRange& prefetch) {
  open_generation_.store(0);
  for (int i = 1, spins = 0; i < job_threads_;) {
    if (joined_[size_t(i)].generation.load() == 0) {
      i++;
    } else if (spins++ < kSpinsBeforeYield) {
      relax_or_prefetch(prefetch);
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::run(const Job& job) {
  open(job);
  run_share(workers_[0]);
  close(workers_[0].prefetch);
  if (out_of_memory_.exchange(false)) throw std::bad_alloc();
}

// Waits for a job newer than `seen`, first spinning, then sleeping; returns false when the pool
// stops.
bool Pool::wait_for_job(int index, uint64_t seen) {
  auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerClock; i++) {
      if (generation_.load(std::memory_order_relaxed) != seen) return true;
      relax_or_prefetch(workers_[size_t(index)].prefetch);
    }
  } while (Clock::now() < deadline);
  release_tiles();
  Sleeper& me = sleepers_[size_t(index)];
  std::unique_lock<std::mutex> lock(me.mutex);
  me.is_asleep.store(true);
  me.wake.wait(lock, [&] { return generation_.load() != seen || stopping_.load(); });
  me.is_asleep.store(false);
  return !stopping_.load();
}

void Pool::worker_loop(int index) {
  enter_float_state();
  std::atomic<uint64_t>& joined = joined_[size_t(index)].generation;
  uint64_t seen = 0;
  while (wait_for_job(index, seen)) {
    seen = generation_.load();
    wake_followers(index, seen);
    if (index >= int(seen & kThreadMask)) continue;
    joined.store(seen);
    if (open_generation_.load() == seen) run_share(workers_[size_t(index)]);
    joined.store(0);
  }
}

Executor::Executor(int num_threads) : pool_(num_threads) {}

Executor::Lease::Lease(Executor& executor)
    : executor_(executor), lock_(executor.mutex_, std::try_to_lock) {
  if (lock_.owns_lock()) {
    scratch_ = &executor_.scratch_;
    unit_arena_ = &executor_.pool_.arena(0);
  } else {
    own_ = std::make_unique<Arena>();
    own_unit_ = std::make_unique<Arena>();
    scratch_ = own_.get();
    unit_arena_ = own_unit_.get();
  }
  float_state_ = enter_float_state();
}

Executor::Lease::~Lease() {
  release_tiles();
  scratch_->reset();
  leave_float_state(float_state_);
}

Weight Executor::Lease::predict_next(const Weight& weight) {
  return lock_.owns_lock() ? executor_.predictor_.record_and_predict(weight) : Weight{};
}

int Executor::Lease::num_threads() const { return lock_.owns_lock() ? executor_.num_threads() : 1; }

void Executor::Lease::run(const Job& job, bool is_parallel) {
  if (is_parallel && num_threads() > 1 && job.units > 1) return executor_.pool_.run(job);
  std::unique_ptr<Worker> own;
  if (!lock_.owns_lock()) own = std::make_unique<Worker>(Worker{0, *unit_arena_});
  Worker& worker = own != nullptr ? *own : executor_.pool_.worker();
  worker.share_end = 0;
  if (worker.arranged != nullptr) worker.arranged->forget();
  for (int64_t begin = 0; begin < job.units; begin += job.max_chunk) {
    unit_arena_->reset();
    job.run(job.context, begin, std::min(begin + job.max_chunk, job.units), worker);
  }
}

}  // namespace cadenza
