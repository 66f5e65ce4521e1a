#include "gpu/device/host_event.h"

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"

namespace sluice {

void Ticket::reuse() {
  const std::scoped_lock lock(mutex_);
  is_complete_ = false;
}

void Ticket::complete() {
  const std::scoped_lock lock(mutex_);
  is_complete_ = true;
  completed_ns_ = steady_now_ns();
  completed_.notify_all();
}

void Ticket::await() {
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [this] { return is_complete_; });
}

bool Ticket::is_complete() const {
  const std::scoped_lock lock(mutex_);
  return is_complete_;
}

std::uint64_t Ticket::completed_ns() const {
  const std::scoped_lock lock(mutex_);
  SLUICE_CHECK(is_complete_, "the record has completed");
  return completed_ns_;
}

std::shared_ptr<Ticket> HostEvent::begin_record() {
  const std::scoped_lock lock(mutex_);
  // With this event as the only holder, no other thread can get a copy: copies are made only under
  // mutex_. So the ticket is free for reuse, and a loop over the same events allocates nothing.
  if (latest_ != nullptr && latest_.use_count() == 1 && latest_->is_complete()) {
    latest_->reuse();
  } else {
    latest_ = std::make_shared<Ticket>();
  }
  return latest_;
}

std::shared_ptr<Ticket> HostEvent::latest() const {
  const std::scoped_lock lock(mutex_);
  return latest_;
}

}  // namespace sluice
