#include "io/throttled_queue.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/named_thread.h"
#include "base/trace/trace_recorder.h"
#include "io/pending_list.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"
#include "io/write_cache_model.h"

namespace sluice {
namespace {

constexpr std::uint64_t kRateMin = 1'000'000;  // below, sleeps of minutes look like a hang
constexpr std::uint64_t kNever = UINT64_MAX;

std::chrono::steady_clock::time_point time_at(std::uint64_t time_ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time_ns));
}

class DeadlineQueue final : public ThrottledQueue {
 public:
  DeadlineQueue(std::unique_ptr<IoQueue> drive, const ThrottleOptions& options)
      : options_(options),
        cache_(options.write_cache_bytes, static_cast<double>(options.write_bytes_per_second)),
        drive_(std::move(drive)),
        thread_(start_thread("sluice-throttle", [this] { run(); })) {}

  ~DeadlineQueue() override {
    wait_idle();
    {
      const std::scoped_lock lock(mutex_);
      is_stopping_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }

  void submit(std::span<IoRequest* const> requests) override;

  void wait_idle() override {
    check_caller();
    ledger_.wait_idle();
  }

  IoCounters counters() const override { return drive_->counters(); }
  IoCounters drive_counters(std::uint32_t drive) const override {
    return drive_->drive_counters(drive);
  }
  std::string_view name() const override { return drive_->name(); }
  std::string_view note() const override { return drive_->note(); }
  std::uint64_t late_ns() const override {
    const std::scoped_lock lock(mutex_);
    return late_ns_;
  }

 private:
  // A request on its way through both drives.
  struct Job {
    DeadlineQueue* queue = nullptr;
    std::list<Job>::iterator self;
    IoRequest* request = nullptr;  // the caller's
    IoRequest real;                // the real queue works on this copy
    IoRequest turn;                // its place among the requests that wait for the emulated drive
    std::uint64_t ticket = 0;
    std::uint64_t arrived_ns = 0;
    std::uint64_t taken_up_ns = 0;  // when the emulated drive took it up
    std::uint64_t deadline_ns = 0;
    std::uint64_t served = 0;    // its number in that order
    std::uint64_t moved_ns = 0;  // when the real queue had finished it; 0 = not yet
  };
  using Jobs = std::list<Job>;

  // One direction of the emulated drive, or both directions when it is half duplex.
  struct Line {
    PendingList waiting;  // of turns
    std::uint64_t free_ns = 0;
  };

  void check_caller() const {
    SLUICE_CHECK(serves_ != this,
                 "a callback must neither submit to its own queue nor wait for it");
  }
  Line& line_of(IoKind kind) {
    return lines_[options_.duplex == Duplex::kFull && kind != IoKind::kRead ? 1 : 0];
  }
  static void moved(IoRequest& real);
  void run();
  void arrive(Job& job);
  std::uint64_t serve(std::uint64_t now_ns);
  void serve(Job& job, std::uint64_t taken_up_ns, std::uint64_t duration_ns);
  Job* next_answer();
  std::uint64_t occupied_ns(const IoRequest& request);
  std::uint64_t transfer_ns(const IoRequest& request) const;
  void deliver(Job& job, std::unique_lock<std::mutex>& lock);

  inline static thread_local const DeadlineQueue* serves_ = nullptr;  // the calling thread's queue

  // Constant after construction.
  ThrottleOptions options_;

  RequestLedger ledger_;  // any thread; for wait_idle()

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Line, 2> lines_;
  WriteCacheModel cache_;
  Jobs jobs_;   // in flight
  Jobs spare_;  // nodes for reuse
  std::uint64_t served_ = 0;
  std::uint64_t late_ns_ = 0;
  bool is_stopping_ = false;

  std::unique_ptr<IoQueue> drive_;  // its callbacks use everything above
  std::thread thread_;              // last: starts when everything else is ready
};

void DeadlineQueue::submit(std::span<IoRequest* const> requests) {
  check_caller();
  for (IoRequest* request : requests) begin_transfer(*request);
  std::uint64_t ticket = ledger_.open(requests.size());
  const std::uint64_t arrived_ns = steady_now_ns();
  // All of them arrive before the real queue sees one. The real queue may be slow in submit(), and
  // the emulated drive would then begin late.
  std::vector<IoRequest*> real;
  real.reserve(requests.size());
  {
    const std::scoped_lock lock(mutex_);
    for (IoRequest* request : requests) {
      if (spare_.empty()) spare_.emplace_back();
      const Jobs::iterator job = spare_.begin();
      jobs_.splice(jobs_.end(), spare_, job);
      *job = Job();
      job->queue = this;
      job->self = job;
      job->request = request;
      job->real = *request;
      job->ticket = ticket++;
      job->arrived_ns = arrived_ns;
      job->real.context = &*job;
      job->real.on_complete = moved;
      job->turn = {.priority = request->priority, .context = &*job};
      arrive(*job);
      real.push_back(&job->real);
    }
    changed_.notify_one();
  }
  drive_->submit(real);
}

// Runs on a thread of the real queue.
void DeadlineQueue::moved(IoRequest& real) {
  Job& job = *static_cast<Job*>(real.context);
  const std::scoped_lock lock(job.queue->mutex_);
  job.moved_ns = steady_now_ns();
  // Under the lock: once the job is gone, the queue may be gone too.
  job.queue->changed_.notify_one();
}

void DeadlineQueue::run() {
  ::prctl(PR_SET_TIMERSLACK, 1);  // wakes on time, not up to 50 us later
  serves_ = this;
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    const std::uint64_t now_ns = steady_now_ns();
    std::uint64_t wake_ns = serve(now_ns);
    Job* const answer = next_answer();
    if (answer != nullptr && answer->moved_ns != 0 && answer->deadline_ns <= now_ns) {
      deliver(*answer, lock);
      continue;
    }
    if (answer != nullptr && answer->moved_ns != 0)
      wake_ns = std::min(wake_ns, answer->deadline_ns);
    if (wake_ns != kNever) {
      changed_.wait_until(lock, time_at(wake_ns));
    } else {
      changed_.wait(lock);
    }
  }
}

// A write that the cache takes never waits for the drive.
void DeadlineQueue::arrive(Job& job) {
  Line& line = line_of(job.request->kind);
  if (cache_.exists() && job.request->kind == IoKind::kWrite) {
    serve(job.arrived_ns);  // what has come before, so that the cache is as it is now
    if (line.waiting.count() == 0 && line.free_ns < job.arrived_ns) {
      (void)cache_.idle(job.arrived_ns - line.free_ns);
      line.free_ns = job.arrived_ns;
    }
    if (cache_.take(job.request->length_bytes)) return serve(job, job.arrived_ns, 0);
  }
  line.waiting.push({&job.turn, job.ticket});
}

// Lets the emulated drive take up its requests until `now_ns`. Returns when it takes up the next.
std::uint64_t DeadlineQueue::serve(std::uint64_t now_ns) {
  std::uint64_t wake_ns = kNever;
  for (Line& line : lines_) {
    while (line.waiting.count() != 0 && line.free_ns <= now_ns) {
      Job* const job = static_cast<Job*>(line.waiting.pop().request->context);
      const std::uint64_t taken_up_ns = std::max(line.free_ns, job->arrived_ns);
      if (cache_.exists() && &line == &line_of(IoKind::kWrite))
        (void)cache_.idle(taken_up_ns - line.free_ns);
      const std::uint64_t duration_ns = occupied_ns(*job->request);
      line.free_ns = taken_up_ns + duration_ns;
      serve(*job, taken_up_ns, duration_ns);
    }
    if (line.waiting.count() != 0) wake_ns = std::min(wake_ns, line.free_ns);
  }
  return wake_ns;
}

void DeadlineQueue::serve(Job& job, std::uint64_t taken_up_ns, std::uint64_t duration_ns) {
  job.served = ++served_;
  job.taken_up_ns = taken_up_ns;
  note_start(*job.request, taken_up_ns);
  job.deadline_ns = taken_up_ns + duration_ns + options_.latency_ns;
}

// Returns the next job that the emulated drive answers; nullptr when it has taken up none.
DeadlineQueue::Job* DeadlineQueue::next_answer() {
  Job* first = nullptr;
  for (Job& job : jobs_) {
    if (job.served == 0) continue;
    if (first == nullptr ||
        std::pair(job.deadline_ns, job.served) < std::pair(first->deadline_ns, first->served))
      first = &job;
  }
  return first;
}

// The time for which a request that has its turn occupies the emulated drive.
std::uint64_t DeadlineQueue::occupied_ns(const IoRequest& request) {
  if (cache_.exists() && request.kind == IoKind::kFlush) return cache_.empty() + options_.flush_ns;
  if (cache_.exists() && request.kind == IoKind::kWrite)
    return cache_.make_room(request.length_bytes);
  return transfer_ns(request);
}

std::uint64_t DeadlineQueue::transfer_ns(const IoRequest& request) const {
  if (request.kind == IoKind::kFlush) return options_.flush_ns;
  const std::uint64_t rate = request.kind == IoKind::kRead ? options_.read_bytes_per_second
                                                           : options_.write_bytes_per_second;
  if (rate == 0) return 0;
  return static_cast<std::uint64_t>(static_cast<double>(request.length_bytes) * 1e9 /
                                    static_cast<double>(rate));
}

void DeadlineQueue::deliver(Job& job, std::unique_lock<std::mutex>& lock) {
  if (job.moved_ns > job.deadline_ns) late_ns_ += job.moved_ns - job.deadline_ns;
  IoRequest& request = *job.request;
  request.error = job.real.error;
  request.transferred_bytes = job.real.transferred_bytes;
  request.moved_ns = std::max(job.deadline_ns, job.moved_ns);
  const std::uint64_t ticket = job.ticket;
  spare_.splice(spare_.end(), jobs_, job.self);
  lock.unlock();
  request.on_complete(request);  // from here on the request may be gone
  ledger_.close(ticket);
  lock.lock();
}

void check_rate(std::uint64_t rate, const char* direction) {
  if (rate == 0 || rate >= kRateMin) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("a throttled queue that {} {} bytes per second; give it 0 (no limit) or "
                          "at least {}",
                          direction, rate, kRateMin));
}

}  // namespace

std::unique_ptr<ThrottledQueue> make_throttled_queue(std::unique_ptr<IoQueue> drive,
                                                     const ThrottleOptions& options) {
  check_rate(options.read_bytes_per_second, "reads");
  check_rate(options.write_bytes_per_second, "writes");
  return std::make_unique<DeadlineQueue>(std::move(drive), options);
}

}  // namespace sluice
