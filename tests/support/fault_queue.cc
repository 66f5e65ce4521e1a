#include "tests/support/fault_queue.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "io/blocking_transfer.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"

namespace sluice::test {
namespace {

constexpr auto kHold = std::chrono::milliseconds(3);

class SeededFaults : public FaultQueue {
 public:
  SeededFaults(std::unique_ptr<IoQueue> inner, const FaultOptions& options)
      : inner_(std::move(inner)),
        options_(options),
        random_(options.seed),
        thread_([this] { run(); }) {}

  ~SeededFaults() override {
    {
      const std::scoped_lock lock(mutex_);
      is_stopping_ = true;
      release_hung();
    }
    changed_.notify_all();
    thread_.join();
  }

  void submit(std::span<IoRequest* const> requests) override {
    {
      const std::scoped_lock lock(mutex_);
      for (IoRequest* request : requests) waiting_.push_back({request, strikes(*request)});
    }
    changed_.notify_all();
  }

  void wait_idle() override {
    {
      std::unique_lock lock(mutex_);
      release_hung();
      changed_.notify_all();
      changed_.wait(lock, [this] { return waiting_.empty() && !is_forwarding_; });
    }
    inner_->wait_idle();
  }

  IoCounters counters() const override {
    IoCounters sum = inner_->counters();
    sum += ledger_.counters();
    return sum;
  }
  std::string_view name() const override { return inner_->name(); }
  std::uint64_t struck() const override { return struck_; }
  std::uint64_t struck_offset_bytes() const override { return struck_offset_bytes_; }

 private:
  struct Waiting {
    IoRequest* request;
    bool is_struck;
  };
  using Place = std::pair<int, std::uint64_t>;  // descriptor, length

  bool is_drive_fault() const { return options_.fault >= Fault::kBitFlip; }

  // With mutex_ held, in the order of submission.
  bool strikes(const IoRequest& request) {
    const std::uint64_t index = submitted_++;
    const bool is_write = request.kind == IoKind::kWrite;
    bool strikes = options_.sticky ? index >= options_.at : index >= options_.at && struck_ == 0;
    if (is_drive_fault()) strikes = strikes && is_write;
    if (is_write && options_.fault == Fault::kMisdirected) {
      auto& offsets = written_[{request.descriptor, request.length_bytes}];
      strikes = strikes && !offsets.empty() && offsets.front() != request.offset_bytes;
      offsets.push_back(request.offset_bytes);
    }
    if (strikes) {
      ++struck_;
      struck_offset_bytes_ = request.offset_bytes;
    }
    return strikes && options_.fault != Fault::kNone;
  }

  void release_hung() {
    waiting_.insert(waiting_.end(), hung_.begin(), hung_.end());
    hung_.clear();
    hangs_ = false;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      std::size_t chosen = 0;
      if (options_.delay_us_max != 0) {
        const auto delay = std::chrono::microseconds(random_() % options_.delay_us_max);
        lock.unlock();
        std::this_thread::sleep_for(delay);
        lock.lock();
        chosen = random_() % waiting_.size();
      }
      Waiting next = waiting_[chosen];
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(chosen));
      if (next.is_struck && options_.fault == Fault::kHang && hangs_) {
        hung_.push_back(next);
        continue;
      }
      is_forwarding_ = true;
      lock.unlock();
      if (next.is_struck && options_.fault == Fault::kReordered) {
        std::this_thread::sleep_for(kHold);
        lock.lock();
        waiting_.push_back({next.request, false});
        is_forwarding_ = false;
        continue;
      }
      forward(next);
      lock.lock();
      is_forwarding_ = false;
      changed_.notify_all();
    }
  }

  void forward(const Waiting& next) {
    IoRequest* request = next.request;
    if (!next.is_struck || options_.fault == Fault::kHang) return inner_->submit({&request, 1});
    if (options_.fault == Fault::kDelayed) {
      std::this_thread::sleep_for(kHold);
      return inner_->submit({&request, 1});
    }
    begin_transfer(*request);
    if (is_drive_fault()) {
      lie(*request);
    } else {
      attempt_with_fault(*request);
    }
    request->on_complete(*request);
  }

  void attempt_with_fault(IoRequest& request) {
    bool strikes = true;
    TransferStep step;
    do {
      step =
          advance_transfer(request, strikes ? struck_attempt(request) : attempt_blocking(request));
      ledger_.count(request, step);
      strikes = options_.sticky;
    } while (step != TransferStep::kEnded);
  }

  std::int64_t struck_attempt(const IoRequest& request) const {
    if (options_.fault == Fault::kErrno) return -options_.error;
    if (options_.fault == Fault::kZeroBytes) return 0;
    const TransferAttempt next = next_attempt(request);
    IoRequest part = request;
    part.offset_bytes = next.offset_bytes;
    part.data = next.data;
    part.transferred_bytes = 0;
    part.length_bytes = options_.fault == Fault::kHalf ? next.length_bytes / 2
                        : next.length_bytes > 4096     ? next.length_bytes - 4096
                                                       : 0;
    // The cache, if any, takes what O_DIRECT would refuse: sizes are what matters here.
    part.length_bytes = part.length_bytes / 512 * 512;
    return attempt_blocking(part);
  }

  // A write that the drive reports as done.
  void lie(IoRequest& request) {
    IoRequest real = request;
    if (options_.fault == Fault::kMisdirected)
      real.offset_bytes = written_place({request.descriptor, request.length_bytes});
    // In a copy: the engine goes on reading what it writes.
    AlignedBuffer flipped;
    if (options_.fault == Fault::kBitFlip) {
      const std::uint64_t bit = random_() % (request.length_bytes * 8);
      flipped = AlignedBuffer(request.length_bytes, "a damaged write");
      std::memcpy(flipped.data(), request.data, request.length_bytes);
      flipped.data()[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
      real.data = flipped.data();
    }
    if (options_.fault != Fault::kLostWrite) {
      TransferStep step;
      do {
        step = advance_transfer(real, attempt_blocking(real));
      } while (step != TransferStep::kEnded);
      SLUICE_CHECK(real.error == 0, "the file takes writes");
    }
    request.transferred_bytes = request.length_bytes;
    ledger_.count(request, TransferStep::kEnded);
  }

  std::uint64_t written_place(const Place& place) {
    const std::scoped_lock lock(mutex_);
    return written_[place].front();
  }

  std::unique_ptr<IoQueue> inner_;
  FaultOptions options_;
  RequestLedger ledger_;
  std::atomic<std::uint64_t> struck_ = 0;
  std::atomic<std::uint64_t> struck_offset_bytes_ = 0;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uint64_t submitted_ = 0;
  std::vector<Waiting> waiting_;
  std::vector<Waiting> hung_;
  std::map<Place, std::vector<std::uint64_t>> written_;
  bool hangs_ = true;
  bool is_forwarding_ = false;
  bool is_stopping_ = false;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<FaultQueue> make_fault_queue(std::unique_ptr<IoQueue> inner,
                                             const FaultOptions& options) {
  return std::make_unique<SeededFaults>(std::move(inner), options);
}

}  // namespace sluice::test
