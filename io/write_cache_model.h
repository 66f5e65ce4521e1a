// A model of the volatile write cache of an emulated drive. The model knows only the number of
// bytes in the cache. A write goes into the cache while the cache has room. The drive writes the
// contents of the cache to the medium while the drive has nothing else to do, and also during a
// flush. If the cache is full, a write waits in the queue with the drive's other requests. The
// drive then moves enough of the cache's contents to the medium to make room for the write.
//
// Example: a drive has a cache of 256 MB and writes 1 GB/s. The drive gets requests for 300 MB at
// the same time. Each request has 4 MB. The first 256 MB take no time, and the other 44 MB take 44
// ms. A flush after these requests takes 256 ms.
//
// Thread rule: the model is not thread-safe, and one object owns it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sluice {

class WriteCacheModel {
 public:
  // If the capacity is 0, the drive has no cache. A rate of 0 means no limit.
  WriteCacheModel(std::uint64_t capacity_bytes, double write_bytes_per_second)
      : capacity_bytes_(capacity_bytes), write_bytes_per_second_(write_bytes_per_second) {}

  bool exists() const { return capacity_bytes_ != 0; }
  // Called when the drive had nothing else to do for `duration_ns`. Returns the part of this time
  // in which the drive wrote.
  std::uint64_t idle(std::uint64_t duration_ns) {
    const std::uint64_t busy_ns = std::min(duration_ns, time_ns(held_bytes_));
    const auto written = static_cast<std::uint64_t>(static_cast<double>(duration_ns) * 1e-9 *
                                                    write_bytes_per_second_);
    held_bytes_ -= write_bytes_per_second_ == 0 ? held_bytes_ : std::min(held_bytes_, written);
    return busy_ns;
  }
  // Accepts a write immediately if there is room and no earlier write waits for room. A write that
  // is not accepted waits for make_room().
  bool take(std::uint64_t size_bytes) {
    if (waiting_ != 0 || held_bytes_ + size_bytes > capacity_bytes_) {
      ++waiting_;
      return false;
    }
    held_bytes_ += size_bytes;
    return true;
  }
  // Called when the drive begins a write that has waited. Returns how long the drive needs to make
  // room.
  std::uint64_t make_room(std::uint64_t size_bytes) {
    --waiting_;
    held_bytes_ += size_bytes;
    const std::uint64_t over_bytes = held_bytes_ - std::min(held_bytes_, capacity_bytes_);
    held_bytes_ -= over_bytes;
    return time_ns(over_bytes);
  }
  // Writes everything in the cache to the medium. Returns how long this write takes.
  std::uint64_t empty() {
    const std::uint64_t bytes = held_bytes_;
    held_bytes_ = 0;
    return time_ns(bytes);
  }

 private:
  std::uint64_t time_ns(std::uint64_t size_bytes) const {
    if (write_bytes_per_second_ == 0) return 0;
    return static_cast<std::uint64_t>(static_cast<double>(size_bytes) * 1e9 /
                                      write_bytes_per_second_);
  }

  const std::uint64_t capacity_bytes_;
  const double write_bytes_per_second_;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t waiting_ = 0;  // writes
};

}  // namespace sluice
