#include "gpu/ranks/nccl_watch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/named_thread.h"

namespace sluice {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kInterval{2};

}  // namespace

std::string NcclWatch::Operation::name() const {
  return fmt::format("{} of \"{}\"", kind, std::string_view(subject.data(), subject_bytes));
}

NcclWatch::NcclWatch(CudaDevice& device, std::shared_ptr<RankFailure> failure, const Limits& limits)
    : device_(device),
      failure_(std::move(failure)),
      limits_(limits),
      thread_(start_thread("sluice-nccl", [this] { run(); })) {}

NcclWatch::~NcclWatch() {
  {
    const std::scoped_lock lock(mutex_);
    must_stop_ = true;
  }
  came_.notify_all();
  thread_.join();
}

void NcclWatch::add(NcclCommunicator& communicator) {
  const std::scoped_lock lock(mutex_);
  communicators_.push_back(&communicator);
}

// Operations are over as soon as a failure is latched. Their work on the GPU ends with the abort
// that follows on the thread of the failure.
void NcclWatch::await(const NcclCommunicator& communicator) {
  {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] {
      return std::ranges::none_of(in_flight_, [&](const auto& operation) {
        return operation->communicator == &communicator;
      });
    });
  }
  const std::scoped_lock no_failure(failing_mutex_);
}

void NcclWatch::remove(NcclCommunicator& communicator) {
  await(communicator);
  const std::scoped_lock no_failure(failing_mutex_);  // one may have come since
  const std::scoped_lock lock(mutex_);
  std::erase(communicators_, &communicator);
}

NcclWatch::Operation& NcclWatch::begin(NcclCommunicator& communicator, std::string_view kind,
                                       std::string_view subject, StreamId stream) {
  std::unique_ptr<Operation> operation;
  {
    const std::scoped_lock lock(mutex_);
    if (!spare_.empty()) {
      operation = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (operation == nullptr) operation = std::make_unique<Operation>(device_);
  operation->begun_at.reset();
  operation->is_enqueued = operation->is_dropped = operation->is_over = false;
  device_.record(operation->begun.id(), stream);
  operation->communicator = &communicator;
  operation->kind = kind;
  operation->subject_bytes = std::min(subject.size(), operation->subject.size());
  std::copy_n(subject.data(), operation->subject_bytes, operation->subject.data());
  Operation& begun = *operation;
  {
    const std::scoped_lock lock(mutex_);
    in_flight_.push_back(std::move(operation));
  }
  came_.notify_all();
  return begun;
}

void NcclWatch::end(Operation& operation, StreamId stream) {
  device_.record(operation.ended.id(), stream);
  operation.is_enqueued = true;
}

void NcclWatch::drop(Operation& operation) {
  operation.is_dropped = true;
}

void NcclWatch::run() {
  std::vector<Operation*> looked_at;
  std::unique_lock lock(mutex_);
  for (;;) {
    came_.wait(lock, [this] { return must_stop_ || !in_flight_.empty(); });
    if (must_stop_) return;
    looked_at.clear();
    for (const auto& operation : in_flight_) looked_at.push_back(operation.get());
    lock.unlock();
    for (Operation* const operation : looked_at) look(*operation);
    lock.lock();
    for (auto& operation : in_flight_)
      if (operation->is_over) spare_.push_back(std::move(operation));
    std::erase(in_flight_, nullptr);
    ended_.notify_all();
    if (!in_flight_.empty()) came_.wait_for(lock, kInterval, [this] { return must_stop_; });
  }
}

void NcclWatch::look(Operation& operation) {
  // One whose calls have not returned stays in the list, because its caller still has it.
  const bool is_enqueued = operation.is_enqueued;
  operation.is_over =
      operation.is_dropped ||
      (is_enqueued && (failure_->is_set() || device_.is_complete(operation.ended.id())));
  if (operation.is_over || failure_->is_set()) return;
  if (const std::string why = operation.communicator->failure(); !why.empty())
    return fail(Error(ErrorCode::kRanks, fmt::format("{}: {}", operation.name(), why)));
  if (!operation.begun_at) {
    if (device_.is_complete(operation.begun.id())) operation.begun_at = steady_clock::now();
    return;
  }
  if (steady_clock::now() - *operation.begun_at < std::chrono::duration<double>(limits_.wait))
    return;
  fail(Error(ErrorCode::kRanks,
             fmt::format("{} has waited for other ranks for {} s; one may have been killed or "
                         "stopped; if it is only late, raise sharding.timeout",
                         operation.name(), limits_.wait)));
}

// The device fails first. Operations are left out as soon as the failure is latched, and unfinished
// ones end with their communicator. A wait for the stream then ends with the failure, so what lies
// there is never taken for a result.
void NcclWatch::fail(const Error& error) {
  const std::scoped_lock one_at_a_time(failing_mutex_);
  device_.fail(error);
  failure_->set(error);
  abort_all();
}

// All at once: NCCL's abort waits for what is in front of a communicator's work on its stream,
// which may be another communicator's. And no abort ends a gather by copy engines that waits for a
// rank that is gone.
void NcclWatch::abort_all() {
  std::vector<NcclCommunicator*> communicators;
  {
    const std::scoped_lock lock(mutex_);
    communicators = communicators_;
  }
  std::mutex mutex;
  std::condition_variable ended;
  std::size_t running = communicators.size();
  std::vector<std::thread> threads;
  for (NcclCommunicator* const communicator : communicators) {
    const auto end = [&, communicator] {
      communicator->abort();
      const std::scoped_lock lock(mutex);
      --running;
      ended.notify_one();
    };
    try {
      threads.push_back(start_thread("sluice-abort", end));
    } catch (const Error&) {
      end();  // no thread is to be had
    }
  }
  {
    std::unique_lock lock(mutex);
    const std::chrono::duration<double> limit(limits_.abort);
    if (!ended.wait_for(lock, limit, [&] { return running == 0; })) {
      fmt::print(stderr,
                 "sluice: NCCL has not ended its work {:.3g} s after a failure, so no wait for the "
                 "GPU would return; this process ends\n",
                 limits_.abort);
      std::_Exit(1);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sluice
