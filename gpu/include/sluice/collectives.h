// The seam between Sluice and what connects its ranks: gathers, reductions and broadcasts over
// device memory, asynchronous on a stream of the device. `local` joins threads of one process,
// `mpi` processes on hosts, `nccl` GPUs, and all pass one contract test.
//
// Thread rule: one thread at a time calls an object's operations; on_failure() comes before the
// first of them; abort() may come from any thread. open() is called by the thread that owns all.
// Invariants: an operation is the same call, in the same place of the sequence of calls, on every
// rank of the object; what is issued in an order that depends on timing needs an object of its own
// (open()). Every reduction of floating-point values adds in rank order in fp32 and rounds once
// (base/ordered_sum.h), so all implementations give the same bits. No operation waits for another
// rank longer than the timeout.
// Failure: the first failed operation of a rank is latched: it is reported by the stream's
// synchronize() and to on_failure(), and every later operation of the rank, on any object, fails
// with it at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <sluice/device.h>
#include <sluice/dtype.h>
#include <sluice/error.h>

namespace sluice {

// `subject` names what is moved, such as a unit, in messages; it lives until the operation has
// ended.

// target[r * shard_bytes ...] = the source of rank r. The source may lie at its place in the
// target.
struct AllGather {
  std::byte* target = nullptr;  // rank_count * shard_bytes
  const std::byte* source = nullptr;
  std::uint64_t shard_bytes = 0;
  std::string_view subject;
};

// target[i] = the sum over the ranks of source[rank * shard_elements + i]. With equal types the
// target may be that part of the source. Else one of the types is fp32.
struct ReduceScatter {
  std::byte* target = nullptr;  // shard_elements
  DType target_type = DType::kFp32;
  const std::byte* source = nullptr;  // rank_count * shard_elements
  DType source_type = DType::kFp32;
  std::uint64_t shard_elements = 0;
  std::string_view subject;
};

// data[i] = the sum over the ranks of data[i].
struct AllReduce {
  std::byte* data = nullptr;
  DType type = DType::kFp32;
  std::uint64_t element_count = 0;
  std::string_view subject;
};

// Words are unsigned integers of 64 bits. Of the first `sum_count`, each becomes its sum over the
// ranks, modulo 2^64; of the `minimum_count` behind them, its minimum. A maximum is the complement
// of the minimum of complements, so one operation tells how far values are apart.
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

class Collectives {
 public:
  Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  virtual ~Collectives() = default;

  virtual std::string_view name() const = 0;
  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t rank_count() const = 0;

  // Each is enqueued on `stream` when it returns: it runs behind the work already there, and work
  // enqueued later waits for it. Memory may be reused behind an event recorded after it.
  // Requires: the operations of one object are ordered among themselves, by one stream or by
  // events.
  virtual void all_gather(const AllGather& gather, StreamId stream) = 0;
  virtual void reduce_scatter(const ReduceScatter& reduce, StreamId stream) = 0;
  virtual void all_reduce(const AllReduce& reduce, StreamId stream) = 0;
  virtual void all_reduce_integers(const AllReduceIntegers& reduce, StreamId stream) = 0;
  virtual void broadcast(const Broadcast& broadcast, StreamId stream) = 0;
  // Ends on no rank before it has begun on every one.
  virtual void barrier(std::string_view subject, StreamId stream) = 0;

  // A further sequence of operations over some of this object's ranks, in the order given, this one
  // among them. Every rank of this object calls it equally often; those that are in one group give
  // the same list. The new object shares failures with this one, which must outlive it.
  virtual std::unique_ptr<Collectives> open(std::span<const std::uint32_t> ranks) = 0;

  // Operations will use this device memory over and over: an implementation that can be told does
  // them with fewer copies. Every rank calls it in the same place, with as many bytes. Before the
  // memory is freed comes forget_memory(), of all that was given.
  virtual void use_memory(std::span<std::byte> /*memory*/) {}
  virtual void forget_memory() noexcept {}

  // Called once, on a thread of the device, with the first failure of this rank. An empty function
  // takes the former one back: it is not called, nor running, any more.
  virtual void on_failure(std::function<void(const Error&)> handler) = 0;

  // Tells the other ranks that this one cannot go on: their operations fail at once, or they end.
  // Between processes the calling one may end here, too.
  virtual void abort(std::string_view reason) noexcept = 0;
};

}  // namespace sluice
