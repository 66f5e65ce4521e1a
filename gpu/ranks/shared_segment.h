// Memory that processes of one host share, without a name: one of them makes it and says where it
// is, the others open it there, which the system allows to nobody but the same user and root.
// Nothing of it is left when the processes have ended, however they do.
//
// Thread rule: a value.
// Invariant: what is open is what the first one made, of the size that it made.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"

namespace sluice {

// Where a segment is, and which: bytes that one process sends to others.
struct SegmentPlace {
  std::int64_t process = 0;  // 0: there is none
  std::int64_t descriptor = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

class SharedSegment {
 public:
  // None.
  SharedSegment() = default;
  // Zeros. None where the system refuses.
  static SharedSegment make(std::uint64_t size_bytes);
  // None where the system refuses, or where something else is in that place.
  static SharedSegment open(const SegmentPlace& place, std::uint64_t size_bytes);
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  std::byte* data() const { return data_; }  // null for none
  // Of one that was made here. Can be opened until close_place().
  SegmentPlace place() const;
  void close_place() { file_ = UniqueFd(); }

 private:
  explicit SharedSegment(UniqueFd file, std::uint64_t size_bytes);

  UniqueFd file_;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace sluice
