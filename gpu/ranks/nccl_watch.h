// The watch supervises NCCL's operations. An operation may wait for other ranks only for a limited
// time. The limit counts from the end of the earlier work on the operation's stream. The watch also
// looks for errors that NCCL reports from its background work. The watch turns the first failure
// into a failure of the device. Then RankFailure latches this failure. The watch ends NCCL's work
// only after the failure is latched. So no caller uses the data of an unfinished operation as a
// result.
//
// Thread rule: any thread may call every function.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gpu/ranks/nccl_communicator.h"
#include "gpu/ranks/rank_failure.h"

namespace sluice {

class NcclWatch {
 public:
  struct Operation {
    explicit Operation(Device& device) : begun(device), ended(device) {}

    std::string name() const;

    Event begun;  // recorded before the operation
    Event ended;
    NcclCommunicator* communicator = nullptr;
    std::string_view kind;
    // The text is a copy, because the original may be gone before the watch notices the end of the
    // operation.
    std::array<char, 96> subject{};
    std::size_t subject_bytes = 0;
    std::optional<std::chrono::steady_clock::time_point> begun_at;
    // Whether all calls of the operation have returned. A call may block, for example when the
    // device takes no more launches because earlier operations wait for other ranks.
    std::atomic<bool> is_enqueued{false};
    std::atomic<bool> is_dropped{false};  // a call has failed
    bool is_over = false;
  };

  // In seconds.
  struct Limits {
    double wait = 120;  // for other ranks
    double abort = 30;  // for NCCL to end its work after a failure
  };

  // `device` must outlive the watch.
  NcclWatch(CudaDevice& device, std::shared_ptr<RankFailure> failure, const Limits& limits);
  ~NcclWatch();

  // After this call, fail() also ends the communicator's work.
  void add(NcclCommunicator& communicator);
  // Waits until the communicator's operations are over. If a failure has ended them, the call also
  // waits until fail() has aborted their work on the GPU. The watch's thread must not call this.
  void await(const NcclCommunicator& communicator);
  // Does the same, and then forgets the communicator.
  void remove(NcclCommunicator& communicator);

  // The caller calls begin() before the calls that enqueue an operation. From then on, the watch
  // supervises the operation. After the calls that enqueue the operation, the caller passes the
  // result of begin() to end(). If a call has failed, the caller passes the result to drop().
  Operation& begin(NcclCommunicator& communicator, std::string_view kind, std::string_view subject,
                   StreamId stream);
  void end(Operation& operation, StreamId stream);
  void drop(Operation& operation);

  // When the call returns, the device has failed, the failure is latched, and NCCL's work has been
  // aborted. If NCCL does not end its work within the limit, the process ends with a message.
  void fail(const Error& error);

 private:
  void run();
  void look(Operation& operation);
  void abort_all();

  // Constant after construction.
  CudaDevice& device_;
  const std::shared_ptr<RankFailure> failure_;
  const Limits limits_;

  std::mutex mutex_;
  std::condition_variable came_;   // there is an operation, or must_stop_ is set
  std::condition_variable ended_;  // operations ended
  // Guarded by mutex_.
  std::vector<NcclCommunicator*> communicators_;
  std::vector<std::unique_ptr<Operation>> in_flight_;
  std::vector<std::unique_ptr<Operation>> spare_;
  bool must_stop_ = false;

  std::mutex failing_mutex_;  // held while one failure is handled
  std::thread thread_;        // the last member, because the thread uses all others
};

}  // namespace sluice
