// The interface to the connection between Sluice's ranks. Gathers, reductions and broadcasts work
// on device memory, asynchronously on a stream of the device. The implementation `local` joins
// threads of one process, `mpi` joins processes on hosts, and `nccl` joins GPUs. All three
// implementations pass the same contract test.
//
// Thread rule: one thread at a time calls an object's operations. The function on_failure() is
// called before the first operation. Any thread may call abort(). Only the thread that owns all
// objects of the rank calls open().
// Invariants: every rank of an object makes the same calls in the same order. If the order of some
// operations depends on timing, these operations need a separate object. open() makes such an
// object. Every reduction of floating-point values adds in rank order in fp32, and rounds once. So
// all implementations give the same bits. The timeout limits the time that an operation waits for
// another rank.
// Failure: the first failed operation of a rank is latched. The handler of on_failure() and the
// stream's synchronize() report the failure. Every later operation of the rank fails immediately
// with the same error. This rule applies to all objects of the rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/device.h>
#include <sluice/dtype.h>
#include <sluice/error.h>
#include <sluice/export.h>

namespace sluice {

// In messages, `subject` names the moved data, such as a unit. The text must live until the
// operation has ended.

// The source of rank r is copied to the target, at byte r * shard_bytes. The source of a rank may
// be that rank's part of the target.
struct AllGather {
  std::byte* target = nullptr;  // rank_count * shard_bytes
  const std::byte* source = nullptr;
  std::uint64_t shard_bytes = 0;
  std::string_view subject;
};

// Element target[i] becomes the sum of the elements source[rank * shard_elements + i] of all ranks,
// where `rank` is this rank's number. If the types are equal, the target may be this rank's part of
// the source. If the types differ, one of them is fp32.
struct ReduceScatter {
  std::byte* target = nullptr;  // shard_elements
  DType target_type = DType::kFp32;
  const std::byte* source = nullptr;  // rank_count * shard_elements
  DType source_type = DType::kFp32;
  std::uint64_t shard_elements = 0;
  std::string_view subject;
};

// Each element data[i] becomes the sum of the elements data[i] of all ranks.
struct AllReduce {
  std::byte* data = nullptr;
  DType type = DType::kFp32;
  std::uint64_t element_count = 0;
  std::string_view subject;
};

// Words are unsigned integers of 64 bits. Each of the first `sum_count` words becomes the word's
// sum over the ranks, modulo 2^64. Each of the next `minimum_count` words becomes the word's
// minimum over the ranks. For a word x, ~min(~x) is the maximum. So one operation can compute both
// the minimum and the maximum of a value.
struct AllReduceIntegers {
  std::byte* data = nullptr;  // 8-byte aligned
  std::uint64_t sum_count = 0;
  std::uint64_t minimum_count = 0;
  std::string_view subject;

  std::uint64_t count() const { return sum_count + minimum_count; }
};

struct Broadcast {
  std::byte* data = nullptr;
  std::uint64_t size_bytes = 0;
  std::uint32_t root = 0;
  std::string_view subject;
};

class SLUICE_EXPORT Collectives {
 public:
  Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  virtual ~Collectives() = default;

  virtual std::string_view name() const = 0;
  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t rank_count() const = 0;
  // Returns the device of the operations' memory and streams. The result is null if the
  // implementation names no device.
  virtual const Device* memory_device() const { return nullptr; }

  // Each call enqueues its operation on `stream` before the call returns. The operation runs after
  // earlier work on `stream`, and later work waits for the operation. Before reusing the memory of
  // an operation, the caller records an event after the operation and waits for the event.
  // Requires: all operations of the object are on one stream, or events put the operations in an
  // order.
  virtual void all_gather(const AllGather& gather, StreamId stream) = 0;
  virtual void reduce_scatter(const ReduceScatter& reduce, StreamId stream) = 0;
  virtual void all_reduce(const AllReduce& reduce, StreamId stream) = 0;
  virtual void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) = 0;
  virtual void broadcast(const Broadcast& broadcast, StreamId stream) = 0;
  // A barrier ends on a rank only after all ranks have begun the barrier.
  virtual void barrier(std::string_view subject, StreamId stream) = 0;

  // Makes a new object for some of this object's ranks. The new object has a separate sequence of
  // operations. The call may wait for the other ranks of this object. No operation of this object
  // is under way. `ranks` lists the ranks of the new object, in the order that the new object uses.
  // The list includes this rank. Every rank of this object calls open() the same number of times,
  // and the ranks of one group give the same list. The new object shares failures with this object.
  // This object must outlive the new object.
  virtual std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) = 0;

  // Returns whether an operation may block its caller. If the result is true, the engine's
  // scheduler calls the operations through hand_over().
  virtual bool may_block() const { return false; }
  // The call runs `work` once. `work` calls operations of this object only. If may_block() is true,
  // a thread of the collectives calls `work`, perhaps after hand_over() has returned. If
  // may_block() is false, hand_over() itself calls `work` and then returns. The work of all objects
  // of one rank runs in the order of the hand_over() calls. Only one piece of work runs at a time.
  // The destructor waits for all work that was handed over.
  virtual void hand_over(std::function<void()> work) { work(); }
  // Allocates memory that makes reductions of floating-point values fast. Every rank calls this
  // function before the object's first reduction of floating-point values. Without this memory,
  // reductions are slower, but correct.
  // Fails with: kOutOfMemory.
  virtual void prepare_reductions() {}

  // Announces that many operations will use this device memory. An implementation that knows the
  // memory in advance may need fewer copies. Every rank calls use_memory() at the same point of its
  // sequence of calls. All ranks give the same number of bytes. The call forget_memory() cancels
  // all announcements. forget_memory() is called before the memory is freed.
  virtual void use_memory(std::span<std::byte> /*memory*/) {}
  virtual void forget_memory() noexcept {}
  // Returns notes for the user. A note says what the machine's libraries cannot do, and what is
  // done instead. Most notes are known only after use_memory().
  virtual std::vector<std::string> notes() const { return {}; }

  // When this rank fails for the first time, a thread of the device calls `handler` with the
  // failure. `handler` is called only once. An empty function removes the former handler. When
  // on_failure() returns, the former handler is not running and is never called again.
  virtual void on_failure(std::function<void(const Error&)> handler) = 0;

  // Tells the other ranks that this rank cannot go on. In some implementations, the operations of
  // the other ranks then fail immediately. In other implementations, the processes of the other
  // ranks end. If the ranks are processes, the call may also end the calling process.
  virtual void abort(std::string_view reason) noexcept = 0;
};

}  // namespace sluice
