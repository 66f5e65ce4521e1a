#include "engine/checkpoint/piece_cache.h"

#include <algorithm>
#include <iterator>

namespace sluice {
namespace {

// One for each part of a tensor: ranges come in order, part by part. More costs memory.
constexpr std::size_t kPiecesKept = 5;

}  // namespace

std::shared_ptr<PieceCache::Piece> PieceCache::find_or_add(const Key& key) {
  const std::scoped_lock lock(mutex_);
  const auto found =
      std::ranges::find_if(pieces_, [&](const auto& piece) { return piece->key == key; });
  if (found != pieces_.end()) {
    pieces_.splice(pieces_.begin(), pieces_, found);
    return pieces_.front();
  }
  auto added = std::make_shared<Piece>(key);
  // From the end, because the last one has not been used for the longest time. Its memory is used
  // again.
  for (auto piece = pieces_.end(); pieces_.size() >= kPiecesKept && piece != pieces_.begin();) {
    --piece;
    if (piece->use_count() != 1) continue;
    added->buffer = std::move((*piece)->buffer);
    piece = pieces_.erase(piece);
  }
  pieces_.push_front(added);
  return added;
}

std::shared_ptr<const std::span<const std::byte>> PieceCache::get(const Key& key,
                                                                  const Read& read) {
  std::shared_ptr<Piece> piece = find_or_add(key);
  const std::scoped_lock lock(piece->mutex);
  if (!piece->is_read) {
    piece->bytes = read(piece->buffer);
    piece->is_read = true;
  }
  return {piece, &piece->bytes};
}

}  // namespace sluice
