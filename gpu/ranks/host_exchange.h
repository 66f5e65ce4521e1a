// The class runs one sequence of collectives between ranks of one host. The ranks send no messages.
// Data moves in one of two ways. The size of the operation determines which way is used. So every
// rank uses the same way. If a rank has at most 16 KiB of data for each other rank, the data goes
// through the ranks' slots in shared memory. Each rank writes its data to its own slot, reads the
// other ranks' slots, and goes on. The rank does not wait until the other ranks have read the slot.
// Larger data stays in the memory of its rank. Each rank publishes the address of its data, and the
// other ranks copy the data once (process_vm_readv). If the data need not be added, the other ranks
// may copy the data directly to the target. If the data has to be added, the other ranks copy the
// data in small pieces. These pieces stay in the cache until the addition. When all other ranks
// have read the data, the rank that owns the data goes on.
//
// Thread rule: one thread at a time.
// Invariants: most operations take one step of the sequence. If an all_reduce does not use slots,
// the all_reduce takes two steps. An all_reduce of integers takes one step for each slot that the
// words fill. The data of a published step does not change until all ranks have consumed the step.
// If a rank uses a slot in step n, the rank uses this slot again in step n + 2 or later. If a rank
// fails, the rank retracts its published data before the memory of the data can change. After a
// rank has read another rank's data, the rank checks the other rank's signals again. So
// half-written data never becomes a result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/units.h>
#include "gpu/ranks/host_collectives.h"
#include "gpu/ranks/host_neighbors.h"
#include "gpu/ranks/rank_failure.h"
#include "gpu/ranks/rank_group.h"
#include "gpu/ranks/rank_reduction.h"
#include "gpu/ranks/rank_wait.h"

namespace sluice {

class HostExchange {
 public:
  // The size of `staging`. A rank copies the other ranks' data to this memory, and adds the data
  // there.
  static constexpr std::uint64_t kStagingBytes = 256_KiB;
  // The largest number of ranks. With kRanksMax ranks, `staging` still has a few cache lines for
  // each rank.
  static constexpr std::uint32_t kRanksMax = 512;

  // `neighbors` includes all ranks of `group`. `place` is the number of this sequence, and is the
  // same on every rank. A waiting operation ends when `failure` is set. `staging` has kStagingBytes
  // and is used while an operation runs. All references and `staging` must outlive this object.
  HostExchange(const HostNeighbors& neighbors, const HostCollectivesOptions& options,
               const RankFailure& failure, RankGroup group, std::uint32_t place,
               std::span<std::byte> staging);

  // Each call returns when the operation is done.
  // Fails with kRanks if ranks do not answer within the timeout, or fail. The message names these
  // ranks.
  void run(const AllGather& gather);
  void run(const ReduceScatter& reduce);
  void run(const AllReduce& reduce);
  void run(const AllReduceIntegers& reduce);
  void run(const Broadcast& broadcast);
  void run(const Barrier& barrier);

 private:
  using Counter = std::atomic<std::uint64_t> RankSignals::*;

  // The arguments of an operation that all ranks have to pass alike. `type` also has the root of a
  // broadcast.
  struct Shape {
    std::uint64_t size = 0;
    std::uint32_t type = 0;
  };
  template <class Body>
  void attempt(std::string_view kind, std::string_view subject, const Shape& shape,
               const Body& body);
  template <class Body>
  void for_each_peer(const Body& body) const;
  template <class Body>
  void for_each_published(const Body& body);
  void reduce_by_slots(const RankReduction& reduction);
  void reduce_by_reading(const RankReduction& reduction);
  void gather_by_slots(const AllGather& gather);
  void gather_by_reading(const AllGather& gather);
  void all_reduce_by_slots(const AllReduce& reduce);
  void all_reduce_by_reading(const AllReduce& reduce);
  void sum(const RankReduction& reduction, ElementRange piece, std::byte* target);

  bool uses_slots(std::uint64_t taken_bytes, std::uint64_t size_bytes) const;
  void begin_step();
  void require_same_operation(std::uint32_t peer) const;
  std::byte* begin_slot_step();
  void publish(const std::byte* data = nullptr);
  void consume();
  void retract();
  bool has_reached(std::uint32_t peer, Counter counter, std::uint64_t step) const;
  // Ranks that have not reached a step. Ranks that have failed are among them only if all have
  // failed, because some may have failed through another missing rank.
  struct Missing {
    std::vector<std::uint32_t> ranks;
    bool have_failed = false;
  };
  // Fails with kRanks if a rank has failed in another operation.
  Missing missing_ranks(Counter counter, std::uint64_t step) const;
  void await(std::uint32_t peer, Counter counter, std::uint64_t step) {
    await_step(peer, counter, step);
    if (counter == &RankSignals::published && step == step_) require_same_operation(peer);
  }
  void await_step(std::uint32_t peer, Counter counter, std::uint64_t step);
  void await_all(Counter counter, std::uint64_t step);
  void read(std::uint32_t peer, std::uint64_t offset, std::byte* target, std::uint64_t size_bytes);
  std::byte* slot_of(std::uint32_t rank) const;

  // Constant after construction.
  const HostNeighbors& neighbors_;
  const HostCollectivesOptions& options_;
  const RankFailure& failure_;
  const RankGroup group_;
  std::uint32_t place_;
  std::span<std::byte> staging_;
  std::vector<RankSignals*> signals_;  // by rank of the group

  std::uint64_t step_ = 0;       // the step of the running operation
  std::uint32_t operation_ = 0;  // a hash of its kind and shape
  RankWait how_;
  // By rank of the group.
  std::vector<const void*> sources_;  // the sources of a sum
  std::vector<bool> is_done_;
};

}  // namespace sluice
