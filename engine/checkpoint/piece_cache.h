// The pieces of a checkpoint that were read last. Blocks and pieces need not begin at the same
// elements, so neighbouring ranges want the same piece, and it should be read once. Pieces in use
// always stay; of the others, only a few.
//
// Thread rule: any thread. Threads that want the same piece wait for the one that reads it.
#pragma once

#include <cstddef>
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
  // A tensor's part, by its address, and the number of the piece in it.
  using Key = std::pair<const void*, std::size_t>;
  // Reads a piece into memory of `buffer`, which it may replace, and returns where the piece is.
  using Read = std::function<std::span<const std::byte>(AlignedBuffer& buffer)>;

  // The piece, which stays as long as the returned pointer lives.
  // Fails with: the exception of `read`. The next call for the piece then reads again.
  std::shared_ptr<const std::span<const std::byte>> get(const Key& key, const Read& read);

 private:
  struct Piece {
    explicit Piece(const Key& wanted) : key(wanted) {}

    Key key;
    std::mutex mutex;  // for the following
    AlignedBuffer buffer;
    std::span<const std::byte> bytes;
    bool is_read = false;
  };

  std::shared_ptr<Piece> find_or_add(const Key& key);

  // Guarded by mutex_.
  std::mutex mutex_;
  std::list<std::shared_ptr<Piece>> pieces_;  // the one used last comes first
};

}  // namespace sluice
