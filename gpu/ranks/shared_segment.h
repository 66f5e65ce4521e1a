// A segment is unnamed memory. Several processes on one host use the segment together. One process
// makes the segment, and tells the other processes the place of the segment. The other processes
// open the segment at this place. Only root and the user of the first process can open the segment.
// The segment vanishes when the processes end, even if they crash: children that these processes
// forked do not have the segment.
//
// Thread rule: the objects are values.
// Invariant: an object with a segment refers to the segment that the first process made. The
// object's size is the segment's size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/process_fd.h"

namespace sluice {

// The place of a segment, and the number by which a rank recognizes the segment. One process sends
// these bytes to the others.
struct SegmentPlace {
  std::int64_t process = 0;  // 0: there is no segment
  std::int64_t descriptor = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

class SharedSegment {
 public:
  // Makes an object without a segment.
  SharedSegment() = default;
  // Makes a segment of zeros. If the system cannot make the segment, the result has no segment.
  static SharedSegment make(std::uint64_t size_bytes);
  // Opens the segment at `place`. The result has no segment if the system cannot open the segment,
  // or if the place no longer holds this segment.
  static SharedSegment open(const SegmentPlace& place, std::uint64_t size_bytes);
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  std::byte* data() const { return data_; }  // null without a segment
  // Returns the place of a segment that this process made. Other processes can open the segment
  // until close_place() is called.
  SegmentPlace place() const;
  void close_place() { file_ = ProcessFd(); }

 private:
  explicit SharedSegment(ProcessFd file, std::uint64_t size_bytes);

  ProcessFd file_;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace sluice
