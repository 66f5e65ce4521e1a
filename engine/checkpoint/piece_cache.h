// A cache of those pieces of a checkpoint that were read last. Blocks and pieces may begin at
// different elements, so neighboring ranges may need the same piece. The cache keeps a piece that
// two ranges share, so that the piece is read only once. Pieces in use always stay in memory. The
// cache holds a few pieces. The number of pieces grows if threads use many pieces at the same time.
//
// Thread rule: any thread. If several threads want the same piece, one thread reads the piece and
// the other threads wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "base/aligned_buffer.h"

namespace sluice {

class PieceCache {
 public:
  // The address of a tensor's part, and the number of a piece within this part.
  using Key = std::pair<const void*, std::size_t>;
  // Reads a piece into `buffer` and returns the address of the piece. The function may replace
  // `buffer` with other memory.
  using Read = std::function<std::span<const std::byte>(AlignedBuffer& buffer)>;

  // Returns the piece. The piece stays in memory as long as the returned pointer exists. The cache
  // must outlive the pointer.
  // If `read` throws an exception, the call throws this exception. After a failure, the next call
  // for the piece reads the piece again.
  std::shared_ptr<const std::span<const std::byte>> get(const Key& key, const Read& read);

 private:
  struct Piece {
    explicit Piece(const Key& wanted) : key(wanted) {}

    Key key;
    std::uint32_t users = 0;  // guarded by PieceCache::mutex_
    std::mutex mutex;         // guards the next members
    AlignedBuffer buffer;
    std::span<const std::byte> bytes;
    bool is_read = false;
  };

  // A user of a piece. The users of a piece are counted under the mutex of the cache. So a thread
  // that reuses the memory of a piece knows that the last user has finished reading.
  class Use {
   public:
    Use(PieceCache& cache, const Key& key) : cache_(cache), piece_(cache.find_or_add(key)) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();
    Piece& piece() { return *piece_; }

   private:
    PieceCache& cache_;
    std::shared_ptr<Piece> piece_;
  };

  std::shared_ptr<Piece> find_or_add(const Key& key);

  // Guarded by mutex_.
  std::mutex mutex_;
  std::list<std::shared_ptr<Piece>> pieces_;  // the piece that was used last comes first
};

}  // namespace sluice
