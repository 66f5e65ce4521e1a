// The ranks of this rank's host, as far as they need no messages. They have memory that all of them
// see, in which they signal their progress and leave small data, and the right to read each other's
// memory. If the system refuses either to one of them, none of them uses it.
//
// The shared memory is one segment, taken at the start. It has kPlaces places per rank, one per
// sequence of operations: 2 MiB of addresses per rank, of which only the used part becomes memory,
// at most 128 KiB per sequence. Sluice makes it itself (gpu/ranks/shared_segment.h), so no other
// user can get it.
//
// Thread rule: constructed on the thread that has opened the port; then every function from any
// thread. Only one thread at a time writes to a rank's place.
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

// A rank's signals to the others in one sequence of operations, whose steps count from 1. They have
// their cache lines to themselves (two, because processors fetch lines in pairs).
struct alignas(128) RankSignals {
  // The last step whose data is ready, and that this rank has finished reading; 0 when the rank has
  // failed in an operation and its data must not be used.
  std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> consumed{0};
  // Not 0: this rank has failed. Others use it to name the rank that they wait for.
  std::atomic<std::uint64_t> failed{0};
  // The address of step `published`'s data in the rank's own memory, if it is not in a slot.
  std::atomic<std::uint64_t> address{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share them");

// Lets the processes below this one's parent read its memory, where the system allows reading only
// to a process's parents (Yama). Taken back at the end.
class ReadPermit {
 public:
  ReadPermit() = default;
  // Grants nothing where the parent is the first process: that would include every process.
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
  // For data that others read after the rank has gone on: two slots in turn.
  static constexpr std::uint64_t kSlotBytes = 64_KiB;
  // Told what the constructor is about to wait for.
  using Progress = std::function<void(std::string_view wait)>;

  // No neighbors.
  HostNeighbors() = default;
  // Every rank of the world calls it at the same time.
  explicit HostNeighbors(
      MpiPort& port, const Progress& progress = [](std::string_view) {});

  // Whether all of these ranks of the world are on this host and have shared memory.
  bool include(std::span<const std::uint32_t> ranks) const;
  // Requires: include(rank), place < kPlaces.
  RankSignals& signals(std::uint32_t rank, std::uint32_t place) const;
  std::byte* slot(std::uint32_t rank, std::uint32_t place, std::uint64_t step) const;
  // Copies from the memory of the rank's process. Returns 0 or an errno; ESRCH when that process
  // has ended, even if another process has its number by now; `target` has changed in that case.
  int read(std::uint32_t rank, std::uint64_t address, std::byte* target,
           std::uint64_t size_bytes) const;

 private:
  struct Header;
  // A number in a process's memory, present for as long as the memory may be read.
  struct Proof {
    std::atomic<std::uint64_t> number;
    ~Proof() { number.store(0); }
  };
  // How to find a rank's process, and the address of its proof.
  struct Process {
    std::int32_t id = 0;
    std::uint64_t proof_address = 0;
    std::uint64_t proof = 0;
  };
  void take_parts(MpiPort& port, std::span<const std::uint32_t> ranks);
  bool can_read_all(MpiPort& port) const;

  // Constant after construction.
  SharedSegment segment_;
  std::unique_ptr<Proof> proof_;  // this process's own
  ReadPermit permit_;
  // By rank of the world: its part of the segment, or null.
  std::vector<std::byte*> parts_;
  std::vector<Process> processes_;
};

}  // namespace sluice
