// Events of the host device. A Ticket is one record of an event. The ticket is pending after
// record(), and the stream completes the ticket when the stream reaches the record. An event holds
// the ticket of its latest record. A wait holds the ticket that was the latest when the wait was
// enqueued. So a new record does not disturb an earlier wait, and two records on two streams may
// complete in any order.
//
// Thread rule: any thread may call every function.
// Invariants: a ticket completes once. A ticket is reused for another record only if its event is
// the only holder. If a stream holds a ticket, the ticket stays alive even if the event is
// destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace sluice {

class Ticket {
 public:
  // Makes a completed ticket pending again.
  // Requires: the caller is the only holder.
  void reuse();
  void complete();

  // The call blocks the calling thread until complete() has been called.
  void await();
  bool is_complete() const;
  // Returns the time of completion on the steady clock.
  // Requires: is_complete().
  std::uint64_t completed_ns() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable completed_;

  // Guarded by mutex_.
  bool is_complete_ = false;
  std::uint64_t completed_ns_ = 0;
};

class HostEvent {
 public:
  // Returns the pending ticket of a new record. A stream completes the ticket later.
  std::shared_ptr<Ticket> begin_record();
  // Returns the ticket of the latest record. The result is null if the event was never recorded.
  std::shared_ptr<Ticket> latest() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Ticket> latest_;  // guarded by mutex_
};

}  // namespace sluice
