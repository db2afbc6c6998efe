// A bump allocator for scratch memory, reused across jobs; one for each thread or call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace cadenza {

// On a cache line of its own, since its thread writes it with each claim.
class alignas(64) Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // Returns uninitialised, 64-byte aligned memory, valid until reset().
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  // Invalidates everything taken. Several blocks are merged into one, so a steady load stops
  // allocating.
  void reset();

 private:
  struct Block {
    void* data;
    size_t size;
  };
  void* take_bytes(size_t size);
  void add_block(size_t size);

  std::vector<Block> blocks_;
  size_t used_ = 0;
};

}  // namespace cadenza
