#include "core/pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cadenza {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerClock = 64;
constexpr int kSpinsBeforeYield = 4096;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  for (int i = 0; i < num_threads; i++) arenas_.push_back(std::make_unique<Arena>());
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::work(Worker& worker) {
  try {
    claim_units(worker);
  } catch (const std::bad_alloc&) {
    out_of_memory_.store(true);
  }
}

// Large chunks first, single units last: long streams of weights and an even finish.
void Pool::claim_units(Worker& worker) {
  const Job job = job_;
  for (;;) {
    int64_t left = job.units - next_.load(std::memory_order_relaxed);
    if (left <= 0) return;
    int64_t chunk = std::clamp<int64_t>(left / (2 * num_threads_), 1, job.max_chunk);
    int64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
    if (begin >= job.units) return;
    worker.arena.reset();
    job.run(job.context, begin, std::min(begin + chunk, job.units), worker);
  }
}

void Pool::open(const Job& job) {
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  uint64_t generation = generation_.load(std::memory_order_relaxed) + 1;
  open_generation_.store(generation);
  generation_.store(generation);
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(sleep_mutex_); }
    wake_.notify_all();
  }
}

// Afterwards no worker touches the job: a late one sees it closed, an early one is waited for.
void Pool::close() {
  open_generation_.store(0);
  for (int spins = 0; active_.load() != 0; spins++) {
    if (spins < kSpinsBeforeYield) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::run(const Job& job) {
  open(job);
  Worker worker{0, *arenas_[0]};
  work(worker);
  close();
  if (out_of_memory_.exchange(false)) throw std::bad_alloc();
}

// Spins for a moment, then sleeps, until a job newer than `seen` is there or the pool stops.
bool Pool::await_job(uint64_t seen) {
  auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerClock; i++) {
      if (generation_.load(std::memory_order_relaxed) != seen) return true;
      relax();
    }
  } while (Clock::now() < deadline);
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return generation_.load() != seen || stopping_.load(); });
  sleepers_.fetch_sub(1);
  return !stopping_.load();
}

void Pool::serve(int index) {
  enter_float_state();
  Worker worker{index, *arenas_[index]};
  uint64_t seen = 0;
  while (await_job(seen)) {
    seen = generation_.load();
    active_.fetch_add(1);
    if (open_generation_.load() == seen) work(worker);
    active_.fetch_sub(1);
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
  scratch_->reset();
  leave_float_state(float_state_);
}

int Executor::Lease::num_threads() const { return lock_.owns_lock() ? executor_.num_threads() : 1; }

void Executor::Lease::run(const Job& job, bool worth_sharing) {
  if (worth_sharing && num_threads() > 1 && job.units > 1) return executor_.pool_.run(job);
  Worker worker{0, *unit_arena_};
  for (int64_t begin = 0; begin < job.units; begin += job.max_chunk) {
    unit_arena_->reset();
    job.run(job.context, begin, std::min(begin + job.max_chunk, job.units), worker);
  }
}

}  // namespace cadenza
