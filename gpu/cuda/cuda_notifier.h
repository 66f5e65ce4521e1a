// The notifier runs host functions after earlier work on CUDA streams has ended. The streams get no
// callbacks. A callback would delay the next copy of its stream until a thread of the runtime has
// run the callback. The notifier records an event after the work, and one thread polls the events.
// The notifier does not use a stream to wait for events, because such a wait may block other
// streams in the same hardware queue.
//
// While functions wait, the thread polls at least every 100 us. The polling costs a few percent of
// a core. The notifier polls often at first and then less often. So a function is delayed by at
// most about a quarter of the time that the earlier work took.
//
// Thread rule: any thread may call every function.
// Invariant: the functions of one stream run one at a time, in the order of the add() calls. The
// functions keep this order even after a failure of the GPU.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "gpu/device/host_stream.h"

namespace sluice {

class CudaNotifier {
 public:
  // `failure` must outlive the notifier.
  CudaNotifier(int ordinal, FailureLatch& failure);
  CudaNotifier(const CudaNotifier&) = delete;
  CudaNotifier& operator=(const CudaNotifier&) = delete;
  // Requires: drain() has been called for every stream.
  ~CudaNotifier();

  // `stream` is a cudaStream_t of the GPU. If `function` throws, the notifier stores the exception
  // as the failure.
  void add(void* stream, std::function<void()> function);
  // Returns when the functions of `stream` have run.
  void drain(void* stream) noexcept;

 private:
  struct Notice {
    void* event = nullptr;  // null if the record failed; the thread then waits for the stream
    std::function<void()> function;
  };
  struct Head {
    void* stream = nullptr;
    void* event = nullptr;
  };

  void run();
  bool has_ended(const Head& head) const;
  // Runs the oldest of the stream's functions that have not run yet.
  void run_first(const Head& head, std::unique_lock<std::mutex>& lock);
  // Returns an event that is recorded on `stream`, or null.
  void* record(void* stream);
  void latch(int status, const char* call, int line) const;

  const int ordinal_;
  FailureLatch& failure_;

  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_run_;
  // Guarded by mutex_.
  std::unordered_map<void*, std::deque<Notice>> waiting_;  // by stream; no queue is empty
  std::vector<void*> free_events_;
  bool is_ending_ = false;

  std::thread thread_;  // the last member, because the thread uses all others
};

}  // namespace sluice
