// The ranks of this rank's host, as far as they need no messages: memory that all of them see, in
// which they tell each other how far they are and leave small data, and the right to read each
// other's memory. The system may refuse either, to one of them; then none of them has any.
//
// The shared memory is one segment, taken at start, of kPlaces places for each rank, one a sequence
// of operations: 2 MiB of addresses for each rank, of which only what is used becomes memory, 128
// KiB a sequence at most.
//
// Thread rule: constructed on the thread that has opened the port, which must outlive it; then
// every function from any thread. A rank's place is written to by one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/units.h"

namespace sluice {

class MpiPort;

// What a rank tells the others in one sequence of operations, whose steps count from 1. Alone on
// its cache lines (two: processors fetch them in pairs).
struct alignas(128) RankSignals {
  // The last step for which the rank's data is ready, and that it has finished reading; 0 when the
  // rank has failed in an operation and its data must not be used.
  std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> consumed{0};
  // Not 0: it has failed. For who says whom it is waiting for.
  std::atomic<std::uint64_t> failed{0};
  // Where the data of the step `published` is in the rank's own memory, if it is not in a slot.
  std::atomic<std::uint64_t> address{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share them");

class HostNeighbors {
 public:
  static constexpr std::uint32_t kPlaces = 16;
  // Data of a step that is read by the others after the rank has gone on: two slots in turn.
  static constexpr std::uint64_t kSlotBytes = 64_KiB;

  // None.
  HostNeighbors() = default;
  // Every rank of the world at once.
  explicit HostNeighbors(MpiPort& port);

  // Whether all of these ranks of the world are on this host and were given memory.
  bool include(std::span<const std::uint32_t> ranks) const;
  // Requires: include(rank), place < kPlaces.
  RankSignals& signals(std::uint32_t rank, std::uint32_t place) const;
  std::byte* slot(std::uint32_t rank, std::uint32_t place, std::uint64_t step) const;
  // Copies from the memory of the rank's process. Returns 0 or an errno; ESRCH when it has ended.
  int read(std::uint32_t rank, std::uint64_t address, std::byte* target,
           std::uint64_t size_bytes) const;

 private:
  struct Header;
  bool can_read(std::uint32_t rank) const;
  Header& header(std::uint32_t rank) const;

  // Constant after construction. By rank of the world: its part of the segment, or null.
  std::vector<std::byte*> parts_;
  std::vector<std::int32_t> processes_;
};

}  // namespace sluice
