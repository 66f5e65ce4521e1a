#include "gpu/ranks/nccl_caller.h"

#include <utility>

#include <sluice/error.h>
#include "base/named_thread.h"

namespace sluice {

NcclCaller::NcclCaller() : thread_(start_thread("sluice-collect", [this] { run(); })) {}

NcclCaller::~NcclCaller() {
  {
    const std::scoped_lock lock(mutex_);
    SLUICE_CHECK(work_.empty(), "sequences end before the thread that serves them");
    must_stop_ = true;
  }
  came_.notify_one();
  thread_.join();
}

void NcclCaller::post(std::function<void()> work) {
  {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
  }
  came_.notify_one();
}

void NcclCaller::drain() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return work_.empty() && !is_busy_; });
}

void NcclCaller::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    came_.wait(lock, [this] { return must_stop_ || !work_.empty(); });
    if (work_.empty()) return;
    is_busy_ = true;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    is_busy_ = false;
    if (work_.empty()) done_.notify_all();
  }
}

}  // namespace sluice
