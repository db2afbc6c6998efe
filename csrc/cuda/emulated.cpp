// The coroutines behind emulated.h.
#include "cuda/device.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cadenza::cuda::emulated {

namespace {

constexpr size_t kStackBytes = 96 << 10;

struct Copy {
  void* to;
  const void* from;
  bool holds;
};

// A thread of the block.
struct Fiber {
  void* stack_pointer = nullptr;
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  bool has_ended = true;
  std::vector<std::vector<Copy>> copies;  // closed groups, the open one last
};

struct Barrier {
  unsigned waiting = 0, members = 0;
  uint64_t passed = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t scheduler;
  void* scheduler_stack = nullptr;
  unsigned current = 0, size = 0;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<std::vector<unsigned char>> exchanges;
  std::vector<unsigned char> shared;
  const std::function<void()>* body = nullptr;
  bool has_progressed = false;
  std::string fault;
};

Block block;

Fiber& own() { return *block.fibers[block.current]; }

#if defined(__x86_64__)
// Saves the registers that a call keeps, and goes on with another stack.
extern "C" void cadenza_switch_stack(void** from, void* to);
asm(R"(
.text
.globl cadenza_switch_stack
cadenza_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void to_scheduler() { cadenza_switch_stack(&own().stack_pointer, block.scheduler_stack); }
void to_fiber() { cadenza_switch_stack(&block.scheduler_stack, own().stack_pointer); }
void prepare(Fiber& fiber, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t(15);
  auto* words = reinterpret_cast<void**>(top);
  *--words = nullptr;  // where entry would return to: it does not
  *--words = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--words = nullptr;
  fiber.stack_pointer = words;
}
#else
void to_scheduler() { swapcontext(&own().context, &block.scheduler); }
void to_fiber() { swapcontext(&block.scheduler, &own().context); }
void prepare(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &block.scheduler;
  makecontext(&fiber.context, entry, 0);
}
#endif

void leave(Barrier& barrier) {
  barrier.members--;
  if (barrier.members > 0 && barrier.waiting == barrier.members) {
    barrier.waiting = 0;
    barrier.passed++;
  }
}

void wait_at(Barrier& barrier) {
  const uint64_t passed = barrier.passed;
  block.has_progressed = true;
  if (++barrier.waiting == barrier.members) {
    barrier.waiting = 0;
    barrier.passed++;
    return;
  }
  while (barrier.passed == passed) to_scheduler();
  block.has_progressed = true;
}

void run_thread() {
  try {
    (*block.body)();
    for (const auto& group : own().copies) {
      if (!group.empty()) throw KernelFault("a thread ended before it waited for its copies");
    }
  } catch (const std::exception& error) {
    block.fault = error.what();
  }
  own().has_ended = block.has_progressed = true;
  Barrier& warp = block.warps[block.current / kWarp];
  if (warp.waiting > 0) block.fault = "a lane has ended that its warp's operation needs";
  leave(block.all);
  leave(warp);
  for (;;) to_scheduler();
}

void start_block(unsigned threads, size_t shared_bytes) {
  block.size = threads;
  while (block.fibers.size() < threads) block.fibers.push_back(std::make_unique<Fiber>());
  block.all = {0, threads, 0};
  block.warps.assign((threads + kWarp - 1) / kWarp, {});
  block.exchanges.resize(block.warps.size());
  for (size_t warp = 0; warp < block.warps.size(); warp++) {
    block.warps[warp].members = std::min<unsigned>(kWarp, threads - unsigned(warp) * kWarp);
    block.exchanges[warp].resize(kWarp * kLaneBytes);
  }
  block.shared.assign(shared_bytes + 128, 0xff);  // NaN in every type of floats
  for (unsigned thread = 0; thread < threads; thread++) {
    Fiber& fiber = *block.fibers[thread];
    fiber.has_ended = false;
    fiber.copies.assign(1, {});
    prepare(fiber, run_thread);
  }
}

void run_block(bool is_backward) {
  for (unsigned left = block.size; left > 0;) {
    block.has_progressed = false;
    left = 0;
    for (unsigned place = 0; place < block.size; place++) {
      block.current = is_backward ? block.size - 1 - place : place;
      if (own().has_ended) continue;
      threadIdx = {block.current, 0, 0};
      to_fiber();
      if (!block.fault.empty()) throw KernelFault(block.fault);
      if (!own().has_ended) left++;
    }
    if (left > 0 && !block.has_progressed) {
      throw KernelFault("threads wait at a barrier that others do not reach");
    }
  }
}

std::mutex running;

}  // namespace

unsigned char* dynamic_shared() {
  const auto at = reinterpret_cast<uintptr_t>(block.shared.data());
  return reinterpret_cast<unsigned char*>((at + 127) & ~uintptr_t(127));
}

void wait_for_warp() {
  Barrier& barrier = block.warps[block.current / kWarp];
  if (barrier.members < std::min<unsigned>(kWarp, block.size - block.current / kWarp * kWarp)) {
    throw KernelFault("a lane has ended that its warp's operation needs");
  }
  wait_at(barrier);
}

unsigned char* warp_exchange() { return block.exchanges[block.current / kWarp].data(); }

int own_lane() { return int(block.current % kWarp); }

void queue_copy(void* to, const void* from, bool holds) {
  if ((reinterpret_cast<uintptr_t>(to) | (holds ? reinterpret_cast<uintptr_t>(from) : 0)) % 16 != 0) {
    throw KernelFault("an asynchronous copy of 16 bytes is not aligned");
  }
  own().copies.back().push_back({to, from, holds});
}

void close_copies() { own().copies.emplace_back(); }

void finish_copies(int left) {
  auto& groups = own().copies;
  while (int(groups.size()) - 1 > left) {
    for (const Copy& copy : groups.front()) {
      if (copy.holds) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}

void run_grid(dim3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  std::lock_guard<std::mutex> lock(running);
  const char* order = std::getenv("CADENZA_GPU_ORDER");
  const bool is_backward = order != nullptr && std::string(order) == "backward";
  if (threads == 0 || threads > 1024) throw KernelFault("a block has 1 to 1024 threads");
  if (shared_bytes > (227u << 10)) throw KernelFault("a block has at most 227 KiB of shared memory");
  gridDim = grid;
  blockDim = {threads, 1, 1};
  block.body = &body;
  block.fault.clear();
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        start_block(threads, shared_bytes);
        run_block(is_backward);
      }
    }
  }
}

}  // namespace cadenza::cuda::emulated

void __syncthreads() {
  using namespace cadenza::cuda::emulated;
  wait_at(block.all);
}

namespace cadenza::cuda {

namespace {

using emulated::exchange;
using emulated::own_lane;
using emulated::release;
using emulated::value_of;

struct Fragments {
  uint32_t a[4], b[2];
};

Fragments fragments_of(const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  return {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
}

float bf16_at(uint32_t word, int half) { return as_bits<float>(half == 0 ? word << 16 : word & 0xffff0000u); }
int int8_at(uint32_t word, int byte) { return int8_t(word >> 8 * byte); }

// Element (row, k) of A and (k, column) of B, `elements` of which are in a register.
template <int Elements, class At>
auto element_of_a(const unsigned char* values, int row, int k, At at) {
  const int half = k / (4 * Elements), lane = row % 8 * 4 + k % (4 * Elements) / Elements;
  return at(value_of<Fragments>(values, lane).a[row / 8 + 2 * half], k % Elements);
}
template <int Elements, class At>
auto element_of_b(const unsigned char* values, int k, int column, At at) {
  const int half = k / (4 * Elements), lane = column * 4 + k % (4 * Elements) / Elements;
  return at(value_of<Fragments>(values, lane).b[half], k % Elements);
}

void load(uint32_t (&r)[4], const void* row, bool is_transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) throw KernelFault("a row of a matrix is not aligned");
  const unsigned char* rows = exchange(row);
  const int group = own_lane() / 4, pair = own_lane() % 4 * 2;
  for (int i = 0; i < 4; i++) {
    uint16_t elements[2];
    for (int j = 0; j < 2; j++) {
      const int from = is_transposed ? pair + j : group, column = is_transposed ? group : pair + j;
      const auto* at = value_of<const unsigned char*>(rows, i * 8 + from);
      std::memcpy(&elements[j], at + 2 * column, 2);
    }
    r[i] = uint32_t(elements[0]) | uint32_t(elements[1]) << 16;
  }
  release();
}

}  // namespace

void warp_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const unsigned char* values = exchange(fragments_of(a, b));
  for (int i = 0; i < 4; i++) {
    const int row = own_lane() / 4 + i / 2 * 8, column = own_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      d[i] = fmaf(element_of_a<2>(values, row, k, bf16_at), element_of_b<2>(values, k, column, bf16_at), d[i]);
    }
  }
  release();
}

void warp_mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const unsigned char* values = exchange(fragments_of(a, b));
  for (int i = 0; i < 4; i++) {
    const int row = own_lane() / 4 + i / 2 * 8, column = own_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; k++) {
      d[i] += element_of_a<4>(values, row, k, int8_at) * element_of_b<4>(values, k, column, int8_at);
    }
  }
  release();
}

void warp_mma_uint8(int32_t (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  const unsigned char* values = exchange(Fragments{{a[0], a[1], 0, 0}, {b, 0}});
  for (int i = 0; i < 4; i++) {
    const int row = own_lane() / 4 + i / 2 * 8, column = own_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const auto own = value_of<Fragments>(values, row % 8 * 4 + k / 4);
      const auto other = value_of<Fragments>(values, column * 4 + k / 4);
      d[i] += int(own.a[row / 8] >> k % 4 * 8 & 0xff) * int8_at(other.b[0], k % 4);
    }
  }
  release();
}

void warp_load_matrices(uint32_t (&r)[4], const void* row) { load(r, row, false); }
void warp_load_transposed(uint32_t (&r)[4], const void* row) { load(r, row, true); }

}  // namespace cadenza::cuda
