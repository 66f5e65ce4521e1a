// The ranks of this rank's host, as far as they need no messages: memory that all of them see, in
// which they tell each other how far they are and leave small data, and the right to read each
// other's memory. The system may refuse either, to one of them; then none of them has any.
//
// The shared memory is one segment, taken at start, of kPlaces places for each rank, one a sequence
// of operations: 2 MiB of addresses for each rank, of which only what is used becomes memory, 128
// KiB a sequence at most. Sluice makes it itself (gpu/ranks/shared_segment.h): no other user can
// have it.
//
// Thread rule: constructed on the thread that has opened the port; then every function from any
// thread. A rank's place is written to by one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "gpu/ranks/shared_segment.h"

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

// That the processes below this one's parent may read it, where the system allows reading to a
// process's parents alone (Yama). Taken back at the end.
class ReadPermit {
 public:
  ReadPermit() = default;
  // Nothing where the parent is the first process: that would be everybody.
  static ReadPermit for_siblings();
  ReadPermit(ReadPermit&& other) noexcept : is_given_(std::exchange(other.is_given_, false)) {}
  ReadPermit& operator=(ReadPermit&& other) noexcept {
    std::swap(is_given_, other.is_given_);
    return *this;
  }
  ~ReadPermit();

 private:
  bool is_given_ = false;
};

class HostNeighbors {
 public:
  static constexpr std::uint32_t kPlaces = 16;
  // Data of a step that is read by the others after the rank has gone on: two slots in turn.
  static constexpr std::uint64_t kSlotBytes = 64_KiB;
  // Hears what the constructor is about to wait for.
  using Progress = std::function<void(std::string_view wait)>;

  // None.
  HostNeighbors() = default;
  // Every rank of the world at once.
  explicit HostNeighbors(
      MpiPort& port, const Progress& progress = [](std::string_view) {});

  // Whether all of these ranks of the world are on this host and were given memory.
  bool include(std::span<const std::uint32_t> ranks) const;
  // Requires: include(rank), place < kPlaces.
  RankSignals& signals(std::uint32_t rank, std::uint32_t place) const;
  std::byte* slot(std::uint32_t rank, std::uint32_t place, std::uint64_t step) const;
  // Copies from the memory of the rank's process. Returns 0 or an errno; ESRCH when it has ended,
  // also where another process has its number by now: then `target` is not what it was.
  int read(std::uint32_t rank, std::uint64_t address, std::byte* target,
           std::uint64_t size_bytes) const;

 private:
  struct Header;
  // A number in a process's memory, there as long as it may be read.
  struct Proof {
    std::atomic<std::uint64_t> number;
    ~Proof() { number.store(0); }
  };
  // How a rank's process is found, and where its proof is.
  struct Process {
    std::int32_t id = 0;
    std::uint64_t proof_address = 0;
    std::uint64_t proof = 0;
  };
  void take_parts(MpiPort& port, std::span<const std::uint32_t> ranks);
  bool can_read_all(MpiPort& port) const;

  // Constant after construction.
  SharedSegment segment_;
  std::unique_ptr<Proof> proof_;  // the own process's
  ReadPermit permit_;
  // By rank of the world: its part of the segment, or null.
  std::vector<std::byte*> parts_;
  std::vector<Process> processes_;
};

}  // namespace sluice
