// An IoQueue that wraps a real queue. The first `passed` flushes succeed. The next flush fails with
// `error`. If `error` is 0, this flush does not complete until a caller waits for the queue.
//
// Thread rule: the same as for IoQueue.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "io/transfer_progress.h"

namespace sluice::test {

class FlushFault final : public IoQueue {
 public:
  FlushFault(std::unique_ptr<IoQueue> inner, int error, int passed)
      : inner_(std::move(inner)), error_(error), left_(passed) {}
  ~FlushFault() override { release(); }

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* const request : requests) {
      if (request->kind != IoKind::kFlush || left_-- > 0) {
        inner_->submit({&request, 1});
      } else if (error_ != 0) {
        request->error = error_;
        request->on_complete(*request);
      } else {
        const std::scoped_lock lock(mutex_);
        held_.push_back(request);
        note_start(*request, 1);
      }
    }
  }
  void wait_idle() override {
    release();
    inner_->wait_idle();
  }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }

 private:
  void release() {
    const std::scoped_lock lock(mutex_);
    for (IoRequest* const request : std::exchange(held_, {})) inner_->submit({&request, 1});
  }

  std::unique_ptr<IoQueue> inner_;
  const int error_;
  std::atomic<int> left_;
  std::mutex mutex_;
  std::vector<IoRequest*> held_;  // guarded by mutex_
};

}  // namespace sluice::test
