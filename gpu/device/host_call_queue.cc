#include "gpu/device/host_call_queue.h"

#include <utility>

namespace sluice {

std::uint64_t HostCallQueue::add(std::function<void()> function) {
  const std::scoped_lock lock(mutex_);
  waiting_.push_back(std::move(function));
  return ++added_count_;
}

// Under the lock while functions wait: their owner, and `failure_` with it, still exists.
void HostCallQueue::run_up_to(std::uint64_t number, const std::exception_ptr& failure) {
  std::unique_lock lock(mutex_);
  if (failure != nullptr && run_count_ < number) failure_.set(failure);
  while (run_count_ < number) {
    if (is_running_) {
      has_run_.wait(lock);
      continue;
    }
    is_running_ = true;
    std::function<void()> function = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    run_host_function(function, failure_);
    function = nullptr;  // the captures are destroyed before anyone sees the completion
    lock.lock();
    is_running_ = false;
    ++run_count_;
    has_run_.notify_all();
  }
}

void HostCallQueue::run_all() {
  std::uint64_t last = 0;
  {
    const std::scoped_lock lock(mutex_);
    last = added_count_;
  }
  run_up_to(last);
}

}  // namespace sluice
