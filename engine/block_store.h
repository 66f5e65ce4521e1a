// Blocks on storage: turns (block, plane, version) into transfers of an IoQueue and keeps the
// version table. A block's version is the number of updates that it has seen; every fetch names the
// version that it expects, so that last step's weights can never pass for this step's.
//
// Thread rule: all functions on the scheduler's thread, but the blocking ones at the end, which the
// application's thread calls while no step is active.
// Invariants, per block and plane: home(v) -> [fetches] -> home(v) -> store(v+1) -> home(v+1); a
// fetch and a store never overlap.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/layout.h"
#include "engine/scheduler.h"
#include "engine/tiers.h"
#include "io/io_queue.h"

namespace sluice {

// The two parts of a block that live apart: the compute parameters, and the optimizer's record.
enum class Plane : std::uint8_t { kParameter, kRecord };

class BlockStore;

// One transfer of one block's plane. Its owner keeps it in place until `done` runs.
struct Transfer {
  // Set once by the owner: runs on the scheduler's thread when the transfer has ended, well or not.
  // After a failure the scheduler has failed() and the bytes mean nothing.
  std::function<void()> done;

  // The store's own.
  IoRequest request;
  BlockStore* store = nullptr;
  BlockId block{};
  Plane plane = Plane::kParameter;
  std::uint64_t version = 0;
  std::uint64_t begin_ns = 0;
};

// The queue that `storage` asks for. With "auto" and no io_uring it is the reference queue, and
// `explanation` says why.
std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, std::string& explanation);

class BlockStore {
 public:
  // All must outlive the store.
  BlockStore(const Layout& layout, const Tiers& tiers, IoQueue& queue, Scheduler& scheduler);

  // Starts reading into `target` (slot-sized, kStorageAlignBytes aligned).
  // Requires: the plane's home is storage and holds `version`. On return the read is under way;
  // wait for transfer.done; `target` belongs to the transfer until then.
  void fetch(Transfer& transfer, BlockId block, Plane plane, std::byte* target,
             std::uint64_t version);
  // Starts writing `source` as `version`, one more than the home holds. As fetch().
  void store(Transfer& transfer, BlockId block, Plane plane, std::byte* source,
             std::uint64_t version);

  // For planes homed in memory: an update in place has made `version`.
  void advance(BlockId block, Plane plane, std::uint64_t version);
  std::uint64_t version(BlockId block, Plane plane) const { return entry(block, plane).version; }

  // Blocking transfers of the application's thread, outside of steps.
  // Fails with: kIo naming unit, block, file, range and errno.
  void read_now(BlockId block, Plane plane, std::byte* target);
  void write_now(BlockId block, Plane plane, std::byte* source);

 private:
  struct Entry {
    std::uint64_t version = 0;
    std::uint32_t fetches = 0;
    bool storing = false;
  };

  void start(Transfer& transfer, BlockId block, Plane plane, IoKind kind, std::byte* data);
  void complete(Transfer& transfer);
  void transfer_now(BlockId block, Plane plane, IoKind kind, std::byte* data);
  IoRequest request_for(BlockId block, Plane plane, IoKind kind, std::byte* data) const;
  std::string describe(const IoRequest& request, BlockId block, Plane plane) const;
  Entry& entry(BlockId block, Plane plane);
  const Entry& entry(BlockId block, Plane plane) const;

  const Layout& layout_;
  const Tiers& tiers_;
  IoQueue& queue_;
  Scheduler& scheduler_;
  std::vector<Entry> entries_;  // two for each block
};

}  // namespace sluice
