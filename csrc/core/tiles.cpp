#include "core/tiles.h"

namespace cadenza {

ThreadTiles& thread_tiles() {
  static thread_local ThreadTiles tiles{};
  return tiles;
}

void release_tiles() {
  ThreadTiles& mine = thread_tiles();
  if (mine.release == nullptr) return;
  mine.release();
  mine.release = nullptr;
}

}  // namespace cadenza
