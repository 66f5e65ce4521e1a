// A queue through which any thread passes requests to the thread that owns a ring. A Handover has a
// queue with room for `capacity` requests, and an eventfd. The owner of the ring reads the eventfd,
// and sleeps in the kernel during this read. A new request wakes the owner.
//
// Thread rule: any thread may call put() and stop(). Only the owner calls take().
// Invariants: requests leave the queue in the order that pending_list.h describes. If a call of
// take() moves fewer requests than count_max, the next put() makes wake_descriptor() readable.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/process_fd.h"
#include "io/pending_list.h"

namespace sluice {

class Handover {
 public:
  // Fails with kUnsupported if the kernel refuses an eventfd.
  explicit Handover(std::size_t capacity);

  // Adds the requests in order. The first request gets `first_ticket`, and each further request
  // gets the next number. The call blocks until there is room. Requires: stop() has not been
  // called.
  void put(std::span<IoRequest* const> requests, std::uint64_t first_ticket);

  // Moves at most `count_max` requests from the queue to the end of `target`. Does not block.
  // Returns true after stop() has been called.
  bool take(std::size_t count_max, std::vector<Submission>& target);

  // From this call on, take() returns true and wake_descriptor() is readable.
  void stop();

  // Returns a blocking eventfd. The owner sleeps while it reads this eventfd. The owner reads 8
  // bytes. This read returns when there is a request for take(). A call of stop() also ends the
  // read. The descriptor is valid while this object lives.
  int wake_descriptor() const { return wake_.get(); }

 private:
  void wake();  // requires mutex_

  // Constant after construction.
  ProcessFd wake_;
  std::size_t capacity_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable room_made_;
  PendingList waiting_;
  bool wake_wanted_ = false;
  bool stopping_ = false;
};

}  // namespace sluice
