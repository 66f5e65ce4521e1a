// The queue for machines that forbid io_uring: pread and pwrite on threads, each of which takes the
// next request, moves it and calls back. Each request costs a thread and two context switches,
// which io_uring avoids; at the block sizes of storage that is little.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/named_thread.h"
#include "io/blocking_transfer.h"
#include "io/io_queue.h"
#include "io/pending_list.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"

namespace sluice {
namespace {

// More blocking calls at once gain nothing on any drive with blocks of 16 KiB and more.
constexpr std::uint32_t kWorkersMax = 32;

class ThreadQueue final : public IoQueue {
 public:
  explicit ThreadQueue(const IoQueueOptions& options)
      : capacity_((options.backlog != 0 ? options.backlog : options.depth) + options.depth -
                  std::min(options.depth, kWorkersMax)) {
    try {
      for (std::uint32_t i = 0; i < std::min(options.depth, kWorkersMax); ++i)
        workers_.push_back(start_thread("sluice-io", [this] { run(); }));
    } catch (...) {
      join();
      throw;
    }
  }

  ~ThreadQueue() override { join(); }

  void submit(std::span<IoRequest* const> requests) override {
    check_caller();
    for (IoRequest* request : requests) begin_transfer(*request);
    std::uint64_t ticket = ledger_.open(requests.size());
    for (IoRequest* request : requests) {
      std::unique_lock lock(mutex_);
      room_made_.wait(lock, [this] { return waiting_.count() < capacity_; });
      SLUICE_CHECK(!is_stopping_, "submit() to a queue that is being destroyed");
      waiting_.push({request, ticket++});
      // Under the lock: the request may complete, and a thread that waited for it may destroy the
      // queue, while this thread is still on its way out.
      work_came_.notify_one();
    }
  }

  void wait_idle() override {
    check_caller();
    ledger_.wait_idle();
  }

  IoCounters counters() const override { return ledger_.counters(); }
  std::string_view name() const override { return "threads"; }

 private:
  void check_caller() const {
    SLUICE_CHECK(serves_ != this,
                 "a callback must neither submit to its own queue nor wait for it");
  }

  void join() {
    {
      const std::scoped_lock lock(mutex_);
      is_stopping_ = true;
    }
    work_came_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run() {
    serves_ = this;
    std::unique_lock lock(mutex_);
    while (true) {
      work_came_.wait(lock, [this] { return is_stopping_ || waiting_.count() != 0; });
      if (waiting_.count() == 0) return;
      const Submission next = waiting_.pop();
      room_made_.notify_one();
      lock.unlock();
      transfer_blocking(*next.request, ledger_);
      next.request->on_complete(*next.request);  // from here on the request may be gone
      ledger_.close(next.ticket);
      lock.lock();
    }
  }

  inline static thread_local const ThreadQueue* serves_ = nullptr;  // the calling thread's queue

  // Constant after construction.
  std::size_t capacity_;  // of waiting_

  RequestLedger ledger_;  // any thread

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable work_came_;
  std::condition_variable room_made_;
  PendingList waiting_;
  bool is_stopping_ = false;

  std::vector<std::thread> workers_;  // last: they start when everything else is ready
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(const IoQueueOptions& options) {
  check_options(options);
  try {
    return std::make_unique<ThreadQueue>(options);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}; or lower storage.queue_depth, or set "
                                          "storage.backend to \"sync\"",
                                          error.what()));
  }
}

}  // namespace sluice
