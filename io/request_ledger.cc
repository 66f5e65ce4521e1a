#include "io/request_ledger.h"

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

std::uint64_t RequestLedger::open(std::uint64_t request_count) {
  const std::scoped_lock lock(mutex_);
  const std::uint64_t first_ticket = opened_;
  opened_ += request_count;
  return first_ticket;
}

void RequestLedger::count(const IoRequest& request, TransferStep step) {
  const std::scoped_lock lock(mutex_);
  if (step == TransferStep::kResume) {
    ++counters_.resumed;
  } else if (step == TransferStep::kRetry) {
    ++counters_.retried;
  } else if (request.error != 0) {
    ++counters_.failed;
  } else if (request.kind == IoKind::kRead) {
    ++counters_.read_requests;
    counters_.read_bytes += request.length_bytes;
  } else if (request.kind == IoKind::kFlush) {
    ++counters_.flush_requests;
  } else {
    ++counters_.write_requests;
    counters_.write_bytes += request.length_bytes;
  }
}

void RequestLedger::close(std::uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  ++closed_;
  for (Waiter* waiter : waiters_) {
    if (ticket < waiter->tickets_end && --waiter->open == 0) waiter_done_.notify_all();
  }
}

void RequestLedger::wait_idle() {
  std::unique_lock lock(mutex_);
  Waiter waiter{.tickets_end = opened_, .open = opened_ - closed_};
  waiters_.push_back(&waiter);
  waiter_done_.wait(lock, [&] { return waiter.open == 0; });
  std::erase(waiters_, &waiter);
}

IoCounters RequestLedger::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

IoCounters& IoCounters::operator+=(const IoCounters& other) {
  read_requests += other.read_requests;
  read_bytes += other.read_bytes;
  write_requests += other.write_requests;
  write_bytes += other.write_bytes;
  flush_requests += other.flush_requests;
  resumed += other.resumed;
  retried += other.retried;
  failed += other.failed;
  return *this;
}

void check_options(const IoQueueOptions& options) {
  if (options.depth >= 1 && options.depth <= 4096) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("I/O queue with depth {}; give it 1 to 4096", options.depth));
}

}  // namespace sluice
