#include "tests/support/fault_queue.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace sluice::test {
namespace {

class FaultQueue : public IoQueue {
 public:
  FaultQueue(std::unique_ptr<IoQueue> inner, const FaultOptions& options)
      : inner_(std::move(inner)),
        options_(options),
        random_(options.seed),
        thread_([this] { run(); }) {}

  ~FaultQueue() override {
    {
      const std::scoped_lock lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void submit(std::span<IoRequest* const> requests) override {
    {
      const std::scoped_lock lock(mutex_);
      for (IoRequest* request : requests) {
        const bool fails =
            options_.sticky ? submitted_ >= options_.fail_at : submitted_ == options_.fail_at;
        ++submitted_;
        waiting_.push_back({request, fails});
      }
    }
    changed_.notify_all();
  }

  void wait_idle() override {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return waiting_.empty() && !is_forwarding_; });
    }
    inner_->wait_idle();
  }

  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }

 private:
  struct Waiting {
    IoRequest* request;
    bool fails;
  };

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
      const Waiting next = waiting_[chosen];
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(chosen));
      is_forwarding_ = true;
      lock.unlock();
      forward(next);
      lock.lock();
      is_forwarding_ = false;
      changed_.notify_all();
    }
  }

  void forward(const Waiting& next) {
    if (next.fails) {
      next.request->error = options_.fail_error;
      next.request->transferred_bytes = 0;
      next.request->on_complete(*next.request);
    } else {
      inner_->submit({&next.request, 1});
    }
  }

  std::unique_ptr<IoQueue> inner_;
  FaultOptions options_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uint64_t submitted_ = 0;
  std::vector<Waiting> waiting_;
  bool is_forwarding_ = false;
  bool is_stopping_ = false;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoQueue> make_fault_queue(std::unique_ptr<IoQueue> inner,
                                          const FaultOptions& options) {
  return std::make_unique<FaultQueue>(std::move(inner), options);
}

}  // namespace sluice::test
