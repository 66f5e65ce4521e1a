// The neighbors of a rank. Neighbors are ranks of the same host that exchange data without
// messages. Neighbors share memory. Neighbors signal their progress and exchange small data in the
// shared memory. Neighbors may also read each other's memory. If one rank of a host cannot share
// memory or cannot read other ranks' memory, all ranks of the host use messages.
//
// The shared memory is one segment, which is allocated at the start. The segment has kPlaces places
// per rank, one place per sequence of operations. The segment takes 2 MiB of address space per
// rank. The system provides memory only for the addresses that ranks use. Each sequence takes at
// most 128 KiB of memory per rank. SharedSegment makes the segment in such a way that no other user
// can open the segment.
//
// Thread rule: the constructor runs on the thread that has opened the port. Any thread may call the
// other functions. Only one thread at a time writes to a rank's place.
#pragma once

#include <array>
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

class MessagePort;

// The struct has the signals that a rank gives to the other ranks in one sequence of operations.
// The first step is 1. Each rank's signals fill two cache lines, because processors fetch lines in
// pairs.
struct alignas(128) RankSignals {
  // `published` is the last step whose data is ready. `consumed` is the last step that this rank
  // has finished reading. If the rank has failed in an operation, other ranks must not use the
  // rank's data. In this case, `published` and `consumed` are 0.
  std::atomic<std::uint64_t> published{0};
  std::atomic<std::uint64_t> consumed{0};
  // The value is not 0 if this rank has failed. The value helps other ranks to name the rank that
  // caused a failure.
  std::atomic<std::uint64_t> failed{0};
  // The address of the published data in the rank's own memory. The address is for data that is not
  // in a slot.
  std::atomic<std::uint64_t> address{0};
  // Says which operations the rank runs in its last steps: word [step % kStepsKept] has the low
  // half of the step and a hash of the operation. A rank is never so many steps ahead of another.
  static constexpr std::uint64_t kStepsKept = 8;
  std::array<std::atomic<std::uint64_t>, kStepsKept> operations{};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share them");

// While this object lives, all descendants of this process's parent may read the memory of this
// process. Some systems (Yama) let only the ancestors of a process read the memory of the process.
// On these systems, other ranks need this permission. All objects of this process share one
// permission, and the destructor of the last object revokes the permission.
//
// Thread rule: any thread.
class ReadPermit {
 public:
  ReadPermit() = default;
  // If the parent is the first process, the permit grants nothing, because every process descends
  // from the first process.
  static ReadPermit for_siblings();
  // Returns a further permit if this process has one already. Otherwise the result grants nothing.
  static ReadPermit share();
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
  // The size of one slot. A rank alternates between two slots, because other ranks may still be
  // reading the previous slot when the rank writes the next slot.
  static constexpr std::uint64_t kSlotBytes = 64_KiB;
  // Before each wait, the constructor calls this function with the name of the wait.
  using Progress = std::function<void(std::string_view wait)>;

  // Makes an object without neighbors.
  HostNeighbors() = default;
  // Every rank of the world calls this constructor at the same time.
  explicit HostNeighbors(
      MessagePort& port, const Progress& progress = [](std::string_view) {});

  // Returns whether all of `ranks` are on this host and have shared memory. `ranks` has the numbers
  // of the ranks in the world.
  bool include(std::span<const std::uint32_t> ranks) const;
  // Requires: include(rank), place < kPlaces.
  RankSignals& signals(std::uint32_t rank, std::uint32_t place) const;
  std::byte* slot(std::uint32_t rank, std::uint32_t place, std::uint64_t step) const;
  // Copies bytes from the memory of the rank's process to `target`. Returns 0 or an errno. The
  // result is ESRCH if the rank's process has ended, even if a new process has the same process
  // number. If the result is ESRCH, `target` has changed.
  int read(std::uint32_t rank, std::uint64_t address, std::byte* target,
           std::uint64_t size_bytes) const;

 private:
  struct Header;
  // A number in the memory of a process. The number stays in this memory as long as other processes
  // may read the memory.
  struct Proof {
    std::atomic<std::uint64_t> number;
    ~Proof() { number.store(0); }
  };
  // With this data, other ranks find the process of a rank. `proof_address` tells other ranks the
  // place of the proof in the memory of the process.
  struct Process {
    std::int32_t id = 0;
    std::uint64_t proof_address = 0;
    std::uint64_t proof = 0;
  };
  void take_parts(MessagePort& port, std::span<const std::uint32_t> ranks);
  bool can_read_all(MessagePort& port) const;

  // Constant after construction.
  SharedSegment segment_;
  std::unique_ptr<Proof> proof_;  // the proof of this process
  ReadPermit permit_;
  // Each element points to a rank's part of the segment, or is null. The index is the rank's number
  // in the world.
  std::vector<std::byte*> parts_;
  std::vector<Process> processes_;
};

}  // namespace sluice
