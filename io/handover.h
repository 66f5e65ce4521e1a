// Passes requests from any thread to the one thread that owns a ring: a queue with room for
// `capacity` requests, and an eventfd. The owner reads the eventfd in order to sleep in the kernel
// and still hear of new requests.
//
// Thread rule: put() and stop() from any thread, take() from the owner alone.
// Invariants: requests leave as pending_list.h says. If the owner has taken all requests and could
// take more, the next put() makes wake_descriptor() readable.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/unique_fd.h"
#include "io/pending_list.h"

namespace sluice {

class Handover {
 public:
  // Fails with: kUnsupported when the kernel gives no eventfd.
  explicit Handover(std::size_t capacity);

  // Adds the requests in order, with tickets counted from `first_ticket`. Blocks while there is no
  // room.
  // Requires: stop() has not been called.
  void put(std::span<IoRequest* const> requests, std::uint64_t first_ticket);

  // Appends up to `count_max` requests to `target` and makes room for as many. Does not block.
  // Returns true once stop() has been called.
  bool take(std::size_t count_max, std::vector<Submission>& target);

  // Makes take() return true and wake_descriptor() readable.
  void stop();

  // A blocking eventfd: a read of 8 bytes returns when take() would find something. Valid while
  // this object lives.
  int wake_descriptor() const { return wake_.get(); }

 private:
  void wake();  // with mutex_ held

  // Constant after construction.
  UniqueFd wake_;
  std::size_t capacity_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable room_made_;
  PendingList waiting_;
  bool wake_wanted_ = false;
  bool stopping_ = false;
};

}  // namespace sluice
