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
    ++pieces_.front()->users;
    return pieces_.front();
  }
  auto added = std::make_shared<Piece>(key);
  added->users = 1;
  // From the end, because the last one has not been used for the longest time. One alone: where
  // more threads read than pieces are kept, each will want memory again.
  for (auto piece = pieces_.end(); pieces_.size() >= kPiecesKept && piece != pieces_.begin();) {
    --piece;
    if ((*piece)->users != 0) continue;
    added->buffer = std::move((*piece)->buffer);
    pieces_.erase(piece);
    break;
  }
  pieces_.push_front(added);
  return added;
}

PieceCache::Use::~Use() {
  const std::scoped_lock lock(cache_.mutex_);
  --piece_->users;
}

std::shared_ptr<const std::span<const std::byte>> PieceCache::get(const Key& key,
                                                                  const Read& read) {
  const auto use = std::make_shared<Use>(*this, key);
  Piece& piece = use->piece();
  const std::scoped_lock lock(piece.mutex);
  if (!piece.is_read) {
    piece.bytes = read(piece.buffer);
    piece.is_read = true;
  }
  return {use, &piece.bytes};
}

}  // namespace sluice
