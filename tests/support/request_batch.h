// A batch of I/O requests. A test waits for all requests of the batch together. The batch records
// how often each request has completed. Thread rule: one thread fills the batch and waits for the
// batch. The callbacks may come from any thread. Invariant: the batch must outlive its requests'
// completions.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "io/io_queue.h"

namespace sluice::test {

class RequestBatch {
 public:
  explicit RequestBatch(std::size_t count) : entries_(std::make_unique<Entry[]>(count)) {
    for (std::size_t i = 0; i < count; ++i) {
      entries_[i].batch = this;
      entries_[i].request.context = &entries_[i];
      entries_[i].request.on_complete = [](IoRequest& request) {
        auto* entry = static_cast<Entry*>(request.context);
        entry->batch->complete(*entry);
      };
      pointers_.push_back(&entries_[i].request);
    }
  }
  RequestBatch(const RequestBatch&) = delete;
  RequestBatch& operator=(const RequestBatch&) = delete;

  std::size_t size() const { return pointers_.size(); }
  IoRequest& operator[](std::size_t i) { return entries_[i].request; }
  std::span<IoRequest* const> pointers() const { return pointers_; }

  void set(std::size_t i, IoKind kind, int descriptor, std::uint64_t offset_bytes,
           std::span<std::byte> data) {
    IoRequest& request = entries_[i].request;
    request.kind = kind;
    request.descriptor = descriptor;
    request.offset_bytes = offset_bytes;
    request.data = data.data();
    request.length_bytes = data.size();
  }

  // Returns when the number of completions is `rounds` times the number of requests.
  void wait(std::size_t rounds = 1) {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [&] { return completion_count_ >= rounds * pointers_.size(); });
  }

  void submit_and_wait(IoQueue& queue) {
    const std::size_t before = completion_count();
    queue.submit(pointers());
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [&] { return completion_count_ >= before + pointers_.size(); });
  }

  std::size_t completion_count() {
    const std::scoped_lock lock(mutex_);
    return completion_count_;
  }
  std::size_t completions_of(std::size_t i) {
    const std::scoped_lock lock(mutex_);
    return entries_[i].completions;
  }

 private:
  struct Entry {
    IoRequest request;
    RequestBatch* batch = nullptr;
    std::size_t completions = 0;
  };

  void complete(Entry& entry) {
    const std::scoped_lock lock(mutex_);
    ++entry.completions;
    ++completion_count_;
    completed_.notify_all();  // under the lock, because the waiter may then free the batch
  }

  // Constant after construction.
  std::unique_ptr<Entry[]> entries_;
  std::vector<IoRequest*> pointers_;

  // Guarded by mutex_, like Entry::completions.
  std::mutex mutex_;
  std::condition_variable completed_;
  std::size_t completion_count_ = 0;
};

}  // namespace sluice::test
