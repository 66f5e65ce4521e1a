// This class is the common part of all collectives over host memory. Operations become work on the
// streams of the host device. Operations are numbered in the order of the calls. After the first
// failure, all later operations fail. A derived class implements run(). The function run() executes
// one operation on a stream's thread, and returns when the operation is done.
//
// Thread rule: the same as for Collectives. The function run() is called on the device's threads.
// For each object, only one call runs at a time.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <sluice/collectives.h>
#include <sluice/host_device.h>
#include "base/ordered_sum.h"
#include "gpu/ranks/rank_failure.h"
#include "gpu/ranks/rank_group.h"

namespace sluice {

// The way in which data moves between ranks of one host. Every path gives the same bits.
enum class RankPath {
  kBest,
  kMessages,  // MPI messages, as between hosts
  kReading,   // ranks read each other's memory, even for small data
};

// The options say how long an operation waits, how waits are reported, and how elements are added.
struct HostCollectivesOptions {
  // An operation waits at most this many seconds for another rank. The value is at least 0.1. If
  // the value is small, a rank with a slow drive or slow computation counts as failed. If the value
  // is large, a dead rank is noticed late.
  double timeout_s = 120;
  SumFunction sum = nullptr;  // required; see cpu_optim/rank_sum.h
  // The function is called about four times per second while an operation waits for other
  // processes. `waiting` names the ranks and the operation. If the program has been told to end,
  // the function may end the program. The function may run on any thread.
  std::function<void(const std::string& waiting)> on_wait = {};
  // The path is set only in tests. Every rank must have the same path.
  RankPath path = RankPath::kBest;
  // The largest number of ranks that exchange integers in one round of messages
  // (gpu/ranks/integer_reduction.h).
  std::uint32_t direct_ranks_max = 16;
};

struct Barrier {
  std::string_view subject;
};

class HostCollectives : public Collectives {
 public:
  void all_gather(const AllGather& gather, StreamId stream) final { enqueue(gather, stream); }
  void reduce_scatter(const ReduceScatter& reduce, StreamId stream) final {
    enqueue(reduce, stream);
  }
  void all_reduce(const AllReduce& reduce, StreamId stream) final { enqueue(reduce, stream); }
  void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) final {
    enqueue(reduce, stream);
  }
  void broadcast(const Broadcast& broadcast, StreamId stream) final { enqueue(broadcast, stream); }
  void barrier(std::string_view subject, StreamId stream) final {
    enqueue(Barrier{.subject = subject}, stream);
  }
  std::uint32_t rank() const final { return group_.rank; }
  std::uint32_t rank_count() const final { return group_.count(); }
  const Device* memory_device() const final { return &device_; }
  void on_failure(std::function<void(const Error&)> handler) final {
    failure_->on_failure(std::move(handler));
  }

 protected:
  // `device` must outlive this object.
  HostCollectives(HostDevice& device, std::shared_ptr<RankFailure> failure, RankGroup group)
      : device_(device), failure_(std::move(failure)), group_(std::move(group)) {}

  // The function executes the object's operation number `sequence`. The function throws if the
  // operation fails.
  virtual void run(const AllGather& gather, std::uint64_t sequence) = 0;
  virtual void run(const ReduceScatter& reduce, std::uint64_t sequence) = 0;
  virtual void run(const AllReduce& reduce, std::uint64_t sequence) = 0;
  virtual void run(const AllReduceIntegers& reduce, std::uint64_t sequence) = 0;
  virtual void run(const Broadcast& broadcast, std::uint64_t sequence) = 0;
  virtual void run(const Barrier& barrier, std::uint64_t sequence) = 0;

  // Called after an operation has failed. The function ends the waits of this rank's other
  // sequences that do not look at failure().
  virtual void end_waits(const std::string& /*failure*/) {}

  // Returns the largest `own` of all ranks. The call is an operation of the object, and blocks.
  // No other operation of the object is under way.
  std::uint64_t agree_on_maximum(std::uint64_t own, std::string_view subject) {
    if (group_.count() == 1) return own;
    std::uint64_t word = ~own;
    run_latched(
        AllReduceIntegers{
            .data = reinterpret_cast<std::byte*>(&word), .minimum_count = 1, .subject = subject},
        sequence_++);
    return ~word;
  }

  HostDevice& device() const { return device_; }
  const std::shared_ptr<RankFailure>& failure() const { return failure_; }
  const RankGroup& group() const { return group_; }

 private:
  template <class Operation>
  void enqueue(const Operation& operation, StreamId stream) {
    device_.launch(stream,
                   [this, operation, sequence = sequence_++] { run_latched(operation, sequence); });
  }

  // Whatever is thrown ends all sequences of this rank.
  template <class Operation>
  void run_latched(const Operation& operation, std::uint64_t sequence) {
    try {
      failure_->throw_if_set();
      run(operation, sequence);
    } catch (const Error& error) {
      failure_->set(error);
      end_waits(error.what());
      throw;
    } catch (const std::exception& error) {
      failure_->set(Error(ErrorCode::kInternal, error.what()));
      end_waits(error.what());
      throw;
    }
  }

  // Constant after construction.
  HostDevice& device_;
  std::shared_ptr<RankFailure> failure_;
  RankGroup group_;

  std::uint64_t sequence_ = 0;  // calling thread only
};

}  // namespace sluice
