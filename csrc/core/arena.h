// Scratch memory that grows once and is then reused; one for each thread or call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace cadenza {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // Uninitialised, 64-byte aligned; lives until reset().
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  // Forgets everything taken. Several blocks become one, so a steady load settles on one block.
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
