// A stream of the host device. A worker thread runs tasks in the order of their arrival. If another
// thread waits for the stream, the waiting thread runs the tasks that the worker has not begun. If
// the stream is idle, a record completes on the thread that enqueues the record. If the stream is
// idle and `at_once_bytes_max` is set, short copies, short fills and notices also run on the
// enqueueing thread. Running these tasks on the calling thread saves time, because waking a
// sleeping thread takes as long as a small collective between ranks.
//
// Thread rule: any thread may call every public function.
// Invariants: tasks run one at a time, in order. A task's captures are destroyed before the next
// task starts. On every thread, work and host functions run in the environment of
// base/float_environment.h. After the first failure on any stream of the device, copies, fills and
// launched work are skipped. The stream still runs records, waits and host functions, so that every
// waiting thread wakes. The queue has no limit, because the caller's slots limit the work in
// flight.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "gpu/device/host_event.h"

namespace sluice {

// The first failure of a device's work. The latch keeps this failure permanently.
class FailureLatch {
 public:
  void set(std::exception_ptr failure);
  bool is_set() const { return is_set_.load(); }
  void rethrow_if_set() const;

 private:
  std::atomic<bool> is_set_{false};
  mutable std::mutex mutex_;
  std::exception_ptr first_;  // guarded by mutex_
};

struct CopyTask {
  std::byte* target;
  const std::byte* source;
  std::uint64_t size_bytes;
};
struct FillZeroTask {
  std::byte* target;
  std::uint64_t size_bytes;
};
struct RecordTask {
  std::shared_ptr<Ticket> ticket;
};
struct WaitTask {
  std::shared_ptr<Ticket> ticket;
};
struct LaunchTask {
  std::function<void()> function;  // may run for long
};
struct OccupyTask {
  std::uint64_t duration_ns;
};
struct CallHostTask {
  std::function<void()> function;  // must not call the device
  bool is_notice = false;          // short, and no other task waits for it
};
using HostTask = std::variant<CopyTask, FillZeroTask, RecordTask, WaitTask, LaunchTask, OccupyTask,
                              CallHostTask>;

// Returns whether the calling thread is inside a call_host function.
bool is_in_host_function();
// The function runs a call_host function on the calling thread. If the call_host function throws an
// exception, `failure` keeps the exception.
void run_host_function(const std::function<void()>& function, FailureLatch& failure);

class HostStream {
 public:
  struct Options {
    std::uint64_t copy_bytes_per_second = 0;  // 0: copies are not slowed down
    std::uint64_t at_once_bytes_max = 0;
  };

  // `failure` must outlive the stream.
  HostStream(const std::string& name, const Options& options, FailureLatch& failure);
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  // The destructor runs the enqueued tasks, and then joins the thread.
  ~HostStream();

  // `task` runs after all tasks that were enqueued earlier. The call returns at once, unless the
  // calling thread runs a short `task` itself.
  void enqueue(HostTask task);
  // The call blocks until all tasks that were enqueued before this call have run.
  void await();

 private:
  struct Queued {
    HostTask task;
    std::uint64_t enqueued_ns;
  };

  void run_thread();
  bool is_empty() const { return next_ == queue_.size(); }
  bool runs_at_once(const HostTask& task) const;
  void run_next(std::unique_lock<std::mutex>& lock);
  void run_one(Queued& queued);
  void run(const CopyTask& task, std::uint64_t enqueued_ns);
  void occupy(std::uint64_t duration_ns, std::uint64_t enqueued_ns);
  void run_function(const std::function<void()>& function);

  // Constant after construction.
  Options options_;
  FailureLatch& failure_;

  // The emulated bus or computation is busy until this time. Only the thread that has set
  // is_running_ uses this member. Each task adds its nominal duration to this time. The time that
  // the thread has really slept is not added to this time. So if several sleeps end late, the
  // delays do not add up.
  std::uint64_t free_ns_ = 0;

  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

  std::mutex mutex_;
  std::condition_variable enqueued_changed_;
  std::condition_variable finished_changed_;

  // Guarded by mutex_.
  std::vector<Queued> queue_;  // the tasks before next_ have run
  std::size_t next_ = 0;
  bool is_running_ = false;  // a thread runs a task
  std::uint64_t enqueued_count_ = 0;
  std::uint64_t finished_count_ = 0;
  std::uint64_t awaited_count_ = kNone;  // the smallest count that a sleeping await() needs
  bool stopping_ = false;

  std::thread thread_;  // last, so that the thread starts after all other members are ready
};

}  // namespace sluice
