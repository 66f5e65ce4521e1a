#include "io/handover.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

Handover::Handover(std::size_t capacity)
    : wake_(ProcessFd::opened_by([] { return ::eventfd(0, EFD_CLOEXEC); })), capacity_(capacity) {
  if (!wake_) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("cannot create an eventfd for the I/O queue: {}; raise the number of "
                            "open files (ulimit -n) or set storage.backend to \"threads\"",
                            errno_text(errno)));
  }
}

void Handover::put(std::span<IoRequest* const> requests, std::uint64_t first_ticket) {
  while (!requests.empty()) {
    std::unique_lock lock(mutex_);
    room_made_.wait(lock, [this] { return waiting_.count() < capacity_; });
    SLUICE_CHECK(!stopping_, "submit() to a queue that is being destroyed");
    const std::size_t added = std::min(capacity_ - waiting_.count(), requests.size());
    for (IoRequest* request : requests.first(added)) waiting_.push({request, first_ticket++});
    requests = requests.subspan(added);
    // Under the lock: a request may complete, and a thread that waited for it may destroy the
    // queue, while this thread is still on its way out.
    if (std::exchange(wake_wanted_, false)) wake();
  }
}

bool Handover::take(std::size_t count_max, std::vector<Submission>& target) {
  const std::scoped_lock lock(mutex_);
  const std::size_t taken = std::min(waiting_.count(), count_max);
  for (std::size_t i = 0; i < taken; ++i) target.push_back(waiting_.pop());
  // An owner that took as much as it can carry comes back by itself when something completes.
  wake_wanted_ = taken < count_max;
  if (taken > 0) room_made_.notify_all();
  return stopping_;
}

void Handover::stop() {
  const std::scoped_lock lock(mutex_);
  stopping_ = true;
  wake();
}

void Handover::wake() {
  const std::uint64_t one = 1;
  SLUICE_CHECK(::write(wake_.get(), &one, sizeof(one)) == sizeof(one),
               "an eventfd takes 2^64 - 2 wakes before it blocks");
}

}  // namespace sluice
