// Events of the host device. A Ticket is one record of an event: pending when record() is called,
// completed by the stream that reaches it. An event holds the ticket of its latest record; a wait
// holds the ticket that was the latest when the wait was enqueued. So a new record disturbs no
// earlier wait, and two records on two streams may complete in any order.
//
// Thread rule: every function from any thread.
// Invariants: a ticket completes once; a ticket with other holders is never reused for a second
// record; tickets outlive their event for as long as a stream holds them.
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

  // Blocks until complete() has been called.
  void await();
  bool is_complete() const;
  // The time on the steady clock.
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
  // Returns the ticket of a new record, pending. A stream then completes it.
  std::shared_ptr<Ticket> begin_record();
  // Null when never recorded.
  std::shared_ptr<Ticket> latest() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Ticket> latest_;  // guarded by mutex_
};

}  // namespace sluice
