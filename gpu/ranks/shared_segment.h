// Memory that processes of one host share, without a name. One of them makes it and says where it
// is, and the others open it there; the system allows that only to the same user and root. Nothing
// of it remains when the processes have ended, however they end.
//
// Thread rule: a value.
// Invariant: an open segment is the one that the first process made, with that size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"

namespace sluice {

// Where a segment is, and which one: bytes that one process sends to others.
struct SegmentPlace {
  std::int64_t process = 0;  // 0: there is no segment
  std::int64_t descriptor = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

class SharedSegment {
 public:
  // No segment.
  SharedSegment() = default;
  // Makes a segment of zeros; none where the system refuses.
  static SharedSegment make(std::uint64_t size_bytes);
  // Opens it; none where the system refuses, or where something else is in that place.
  static SharedSegment open(const SegmentPlace& place, std::uint64_t size_bytes);
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  std::byte* data() const { return data_; }  // null for none
  // The place of a segment that was made here. It can be opened until close_place().
  SegmentPlace place() const;
  void close_place() { file_ = UniqueFd(); }

 private:
  explicit SharedSegment(UniqueFd file, std::uint64_t size_bytes);

  UniqueFd file_;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace sluice
