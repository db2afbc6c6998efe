#include "core/arena.h"

namespace cadenza {

namespace {
constexpr size_t kAlign = 64;
constexpr size_t kFirstBlock = size_t{1} << 18;
}  // namespace

void Arena::add_block(size_t size) {
  void* data = std::aligned_alloc(kAlign, size);
  if (data == nullptr) throw std::bad_alloc();
  blocks_.push_back({data, size});
  used_ = 0;
}

void* Arena::take_bytes(size_t size) {
  size = (size + kAlign - 1) / kAlign * kAlign;
  if (blocks_.empty() || used_ + size > blocks_.back().size) {
    size_t doubled = blocks_.empty() ? kFirstBlock : 2 * blocks_.back().size;
    add_block(size > doubled ? size : doubled);
  }
  char* at = static_cast<char*>(blocks_.back().data) + used_;
  used_ += size;
  return at;
}

void Arena::reset() {
  used_ = 0;
  if (blocks_.size() <= 1) return;
  size_t total = 0;
  for (const Block& block : blocks_) {
    total += block.size;
    std::free(block.data);
  }
  blocks_.clear();
  add_block(total);
}

}  // namespace cadenza
