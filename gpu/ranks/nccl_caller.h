// This class has a thread that calls NCCL for other threads, because those threads must not wait.
// NCCL may take a while to enqueue an operation. So the engine's scheduler lets another thread call
// the operations (Collectives::hand_over()).
//
// Thread rule: any thread may call every function.
// Invariant: pieces of work run one at a time, in the order of the post() calls. The queue has no
// limit, because the caller's slots limit the work in flight.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace sluice {

class NcclCaller {
 public:
  NcclCaller();
  NcclCaller(const NcclCaller&) = delete;
  NcclCaller& operator=(const NcclCaller&) = delete;
  // Requires: drain() has returned, and no work was posted after that.
  ~NcclCaller();

  // Returns immediately. `work` must not throw.
  void post(std::function<void()> work);
  // The call returns when all earlier work has run. The captures of this work have then been
  // destroyed.
  void drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable came_;  // there is work, or must_stop_ is set
  std::condition_variable done_;  // there is no more work
  // Guarded by mutex_.
  std::deque<std::function<void()>> work_;
  bool is_busy_ = false;
  bool must_stop_ = false;

  std::thread thread_;  // the last member, because the thread uses all others
};

}  // namespace sluice
