#include "gpu/device/host_stream.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/float_environment.h"
#include "base/named_thread.h"
#include "base/trace/trace_recorder.h"

namespace sluice {
namespace {

thread_local bool in_host_function = false;

// Otherwise the kernel may let a sleep last 50 us longer, to save wake-ups.
void wake_this_thread_on_time() {
  (void)prctl(PR_SET_TIMERSLACK, 1);
}

}  // namespace

bool is_in_host_function() {
  return in_host_function;
}

void run_host_function(const std::function<void()>& function, FailureLatch& failure) {
  const FloatEnvironment environment;
  in_host_function = true;
  try {
    function();
  } catch (...) {
    failure.set(std::current_exception());
  }
  in_host_function = false;
}

void FailureLatch::set(std::exception_ptr failure) {
  const std::scoped_lock lock(mutex_);
  if (first_ == nullptr) first_ = std::move(failure);
  is_set_.store(true);
}

void FailureLatch::rethrow_if_set() const {
  if (!is_set()) return;
  std::exception_ptr first;
  {
    const std::scoped_lock lock(mutex_);
    first = first_;
  }
  std::rethrow_exception(first);
}

HostStream::HostStream(const std::string& name, const Options& options, FailureLatch& failure)
    : options_(options), failure_(failure) {
  thread_ = start_thread(name, [this] { run_thread(); });
}

HostStream::~HostStream() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    enqueued_changed_.notify_one();
  }
  thread_.join();
}

// A wake-up takes longer than these tasks. A slowed stream's copies sleep.
bool HostStream::runs_at_once(const HostTask& task) const {
  const std::uint64_t limit_bytes =
      options_.copy_bytes_per_second == 0 ? options_.at_once_bytes_max : 0;
  if (limit_bytes == 0) return false;
  if (const auto* copy = std::get_if<CopyTask>(&task)) return copy->size_bytes <= limit_bytes;
  if (const auto* fill = std::get_if<FillZeroTask>(&task)) return fill->size_bytes <= limit_bytes;
  const auto* call = std::get_if<CallHostTask>(&task);
  return call != nullptr && call->is_notice;
}

// Allocates nothing once the queue has grown: the places of finished tasks are reused first. A
// record with nothing before it completes at once, because waking the thread for it costs the
// caller more than the rest of a lease. The thread is woken behind the lock, which it would
// otherwise wake up to wait for.
void HostStream::enqueue(HostTask task) {
  std::unique_lock lock(mutex_);
  const bool is_idle = is_empty() && !is_running_;
  if (const auto* record = std::get_if<RecordTask>(&task); record != nullptr && is_idle)
    return record->ticket->complete();
  const bool is_for_caller = is_idle && runs_at_once(task);
  if (queue_.size() == queue_.capacity() && next_ > queue_.size() / 2) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(next_));
    next_ = 0;
  }
  queue_.push_back({std::move(task), steady_now_ns()});
  ++enqueued_count_;
  if (is_for_caller) {
    run_next(lock);
    if (is_empty()) return;
  }
  lock.unlock();
  enqueued_changed_.notify_one();
}

// The waiting thread runs the tasks itself, as the stream's thread would, if that has not begun.
void HostStream::await() {
  std::unique_lock lock(mutex_);
  if (finished_count_ == enqueued_count_) return;
  const std::uint64_t target = enqueued_count_;
  while (finished_count_ < target) {
    if (!is_running_) {
      run_next(lock);
      continue;
    }
    awaited_count_ = std::min(awaited_count_, target);
    finished_changed_.wait(lock);
  }
  if (!is_running_ && !is_empty()) enqueued_changed_.notify_one();  // came meanwhile
}

void HostStream::run_thread() {
  wake_this_thread_on_time();
  std::unique_lock lock(mutex_);
  while (true) {
    enqueued_changed_.wait(lock, [this] { return !is_running_ && (!is_empty() || stopping_); });
    if (is_empty()) return;
    run_next(lock);
  }
}

// Requires: the queue is not empty, and no other thread runs a task.
void HostStream::run_next(std::unique_lock<std::mutex>& lock) {
  is_running_ = true;
  Queued queued = std::move(queue_[next_++]);
  if (is_empty()) {
    queue_.clear();
    next_ = 0;
  }
  lock.unlock();
  run_one(queued);
  queued.task = FillZeroTask{};  // the captures are destroyed before anyone sees the completion
  lock.lock();
  is_running_ = false;
  if (++finished_count_ < awaited_count_) return;
  awaited_count_ = kNone;
  finished_changed_.notify_all();
}

void HostStream::run_one(Queued& queued) {
  if (auto* record = std::get_if<RecordTask>(&queued.task)) {
    record->ticket->complete();
  } else if (auto* wait = std::get_if<WaitTask>(&queued.task)) {
    wait->ticket->await();
    free_ns_ = std::max(free_ns_, wait->ticket->completed_ns());
  } else if (auto* call = std::get_if<CallHostTask>(&queued.task)) {
    run_host_function(call->function, failure_);
    free_ns_ = std::max(free_ns_, steady_now_ns());
  } else if (failure_.is_set()) {
    return;
  } else if (auto* copy = std::get_if<CopyTask>(&queued.task)) {
    run(*copy, queued.enqueued_ns);
  } else if (auto* fill = std::get_if<FillZeroTask>(&queued.task)) {
    std::memset(fill->target, 0, fill->size_bytes);
  } else if (auto* launch = std::get_if<LaunchTask>(&queued.task)) {
    run_function(launch->function);
  } else if (auto* busy = std::get_if<OccupyTask>(&queued.task)) {
    occupy(busy->duration_ns, queued.enqueued_ns);
  }
}

void HostStream::run(const CopyTask& task, std::uint64_t enqueued_ns) {
  std::memcpy(task.target, task.source, task.size_bytes);
  if (options_.copy_bytes_per_second == 0) return;
  const double duration_ns = static_cast<double>(task.size_bytes) * 1e9 /
                             static_cast<double>(options_.copy_bytes_per_second);
  occupy(static_cast<std::uint64_t>(duration_ns), enqueued_ns);
}

// The task could start when it was enqueued and everything before it was done: 4096 copies of 4 KiB
// at 1 GB/s end 16.8 ms after the first was enqueued, however late each sleep wakes.
void HostStream::occupy(std::uint64_t duration_ns, std::uint64_t enqueued_ns) {
  free_ns_ = std::max(free_ns_, enqueued_ns) + duration_ns;
  std::this_thread::sleep_until(
      std::chrono::steady_clock::time_point(std::chrono::nanoseconds(free_ns_)));
}

// The calling thread may be the application's, which rounds and flushes as it likes, or the
// stream's, where an earlier task may have changed that.
void HostStream::run_function(const std::function<void()>& function) {
  const FloatEnvironment environment;
  try {
    function();
  } catch (...) {
    failure_.set(std::current_exception());
  }
  free_ns_ = std::max(free_ns_, steady_now_ns());
}

}  // namespace sluice
