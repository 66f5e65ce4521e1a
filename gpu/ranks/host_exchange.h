// One sequence of collectives between ranks of one host, without messages. There are two ways, and
// every rank derives the same one from the operation's size:
// - Up to 16 KiB for each other rank go through the ranks' slots in shared memory: a rank leaves
//   its data there for the others, takes theirs and goes on, without waiting until all have read.
// - Larger data stays where it is: each rank says where, and the others copy it from its memory
//   (process_vm_readv) once, straight to the target or in pieces that are still in the cache when
//   they are added. A rank goes on when all others have read.
//
// Thread rule: one thread at a time.
// Invariants: an operation is one step of the sequence; an all_reduce by reading takes two, and one
// of integers takes as many as it fills slots. The data of a published step stays as it is until
// all have consumed it: a slot is reused two steps later. A rank that fails takes back what it has
// published before its memory can change, and a rank that has read from it checks again, so that
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
#include "gpu/ranks/rank_reduction.h"
#include "gpu/ranks/rank_wait.h"

namespace sluice {

class HostExchange {
 public:
  // This rank's share of memory for reading and adding the others' data.
  static constexpr std::uint64_t kStagingBytes = 256_KiB;
  // With this many ranks, each still has a few cache lines of that memory.
  static constexpr std::uint32_t kRanksMax = 512;

  // `group`: ranks of the world, all among `neighbors`; this rank is number `rank` in it. `place`
  // belongs to this sequence and is the same on every rank. A waiting operation ends when `failure`
  // is set. `staging`, of kStagingBytes, is used while an operation runs. All must outlive it.
  HostExchange(const HostNeighbors& neighbors, const HostCollectivesOptions& options,
               const RankFailure& failure, std::span<const std::uint32_t> group, std::uint32_t rank,
               std::uint32_t place, std::span<std::byte> staging);

  // Each call blocks until the operation is done.
  // Fails with: kRanks naming the ranks that did not answer within the timeout.
  void run(const AllGather& gather);
  void run(const ReduceScatter& reduce);
  void run(const AllReduce& reduce);
  void run(const AllReduceIntegers& reduce);
  void run(const Broadcast& broadcast);
  void run(const Barrier& barrier);

 private:
  using Counter = std::atomic<std::uint64_t> RankSignals::*;

  template <class Body>
  void attempt(std::string_view kind, std::string_view subject, const Body& body);
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
  std::byte* begin_slot_step();
  void publish(const std::byte* data = nullptr);
  void consume();
  void retract();
  bool has_reached(std::uint32_t peer, Counter counter, std::uint64_t step) const;
  std::vector<std::uint32_t> missing_ranks(Counter counter, std::uint64_t step) const;
  void await(std::uint32_t peer, Counter counter, std::uint64_t step);
  void await_all(Counter counter, std::uint64_t step);
  void read(std::uint32_t peer, std::uint64_t offset, std::byte* target, std::uint64_t size_bytes);
  std::byte* slot_of(std::uint32_t rank) const;

  // Constant after construction.
  const HostNeighbors& neighbors_;
  const HostCollectivesOptions& options_;
  const RankFailure& failure_;
  std::vector<std::uint32_t> group_;  // ranks of the world
  std::uint32_t rank_;
  std::uint32_t place_;
  std::span<std::byte> staging_;
  std::vector<RankSignals*> signals_;  // by rank of the group

  std::uint64_t step_ = 0;  // of the running operation
  RankWait how_;
  // By rank of the group.
  std::vector<const void*> sources_;  // the sources of a sum
  std::vector<bool> is_done_;
};

}  // namespace sluice
