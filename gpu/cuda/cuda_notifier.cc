#include "gpu/cuda/cuda_notifier.h"

#include <cuda_runtime.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include <sluice/error.h>
#include "base/named_thread.h"
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"

namespace sluice {
namespace {

constexpr std::chrono::nanoseconds kPauseLeast{5'000};
constexpr std::chrono::nanoseconds kPauseMost{100'000};

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

}  // namespace

CudaNotifier::CudaNotifier(int ordinal, FailureLatch& failure)
    : ordinal_(ordinal),
      failure_(failure),
      thread_(start_thread("cuda reports", [this] { run(); })) {}

CudaNotifier::~CudaNotifier() {
  {
    const std::scoped_lock lock(mutex_);
    SLUICE_CHECK(waiting_.empty(), "streams go before their device");
    is_ending_ = true;
  }
  has_work_.notify_one();
  thread_.join();
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  for (void* const event : free_events_) (void)cudaEventDestroy(event_of(event));
}

void CudaNotifier::latch(int status, const char* call, int line) const {
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
  failure_.set(std::make_exception_ptr(cuda_error(status, call, __FILE__, line)));
}

// Under the lock, so that the events of a stream are recorded in the order of its queue.
void CudaNotifier::add(void* stream, std::function<void()> function) {
  SLUICE_CHECK(function != nullptr, "a host function is given");
  {
    const CudaCurrentDevice current(ordinal_, std::nothrow);
    const std::scoped_lock lock(mutex_);
    void* const event = record(stream);
    waiting_[stream].push_back({.event = event, .function = std::move(function)});
  }
  has_work_.notify_one();
}

void* CudaNotifier::record(void* stream) {
  if (free_events_.empty()) {
    cudaEvent_t made = nullptr;
    const cudaError_t status =
        cudaEventCreateWithFlags(&made, cudaEventBlockingSync | cudaEventDisableTiming);
    if (status != cudaSuccess) {
      latch(status, "cudaEventCreateWithFlags", __LINE__);
      return nullptr;
    }
    free_events_.push_back(made);
  }
  if (const cudaError_t status = cudaEventRecord(event_of(free_events_.back()), stream_of(stream));
      status != cudaSuccess) {
    latch(status, "cudaEventRecord", __LINE__);
    return nullptr;
  }
  void* const event = free_events_.back();
  free_events_.pop_back();
  return event;
}

void CudaNotifier::drain(void* stream) noexcept {
  std::unique_lock lock(mutex_);
  has_run_.wait(lock, [&] { return !waiting_.contains(stream); });
}

void CudaNotifier::run() {
  // Else the kernel may add 50 us to every pause.
  (void)::prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  std::vector<Head> heads;
  std::chrono::nanoseconds pause = kPauseLeast;
  std::unique_lock lock(mutex_);
  while (true) {
    if (waiting_.empty()) {
      pause = kPauseLeast;
      has_work_.wait(lock, [this] { return is_ending_ || !waiting_.empty(); });
    }
    if (waiting_.empty()) return;
    heads.clear();
    for (const auto& [stream, notices] : waiting_)
      heads.push_back({.stream = stream, .event = notices.front().event});
    lock.unlock();
    const auto ended = std::partition(heads.begin(), heads.end(),
                                      [this](const Head& head) { return has_ended(head); });
    if (ended == heads.begin()) {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause + pause / 4, kPauseMost);
    } else {
      pause = kPauseLeast;
    }
    lock.lock();
    for (auto head = heads.begin(); head != ended; ++head) run_first(*head, lock);
  }
}

bool CudaNotifier::has_ended(const Head& head) const {
  if (head.event != nullptr) {
    const cudaError_t status = cudaEventQuery(event_of(head.event));
    if (status == cudaSuccess) return true;
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    latch(status, "work on a stream", __LINE__);
  }
  // As far as the GPU still works; otherwise the runtime returns at once.
  (void)cudaStreamSynchronize(stream_of(head.stream));
  (void)cudaGetLastError();
  return true;
}

void CudaNotifier::run_first(const Head& head, std::unique_lock<std::mutex>& lock) {
  const auto queue = waiting_.find(head.stream);
  std::function<void()> function = std::move(queue->second.front().function);
  lock.unlock();
  run_host_function(function, failure_);
  function = nullptr;  // the captures are destroyed before anyone sees the completion
  lock.lock();
  // Its place may have moved meanwhile, when other streams came.
  const auto found = waiting_.find(head.stream);
  found->second.pop_front();
  if (found->second.empty()) waiting_.erase(found);
  if (head.event != nullptr) free_events_.push_back(head.event);
  has_run_.notify_all();
}

}  // namespace sluice
