// Blocks of state on storage. The store turns (block, plane, version) into transfers of an IoQueue,
// and keeps the table of versions. A block's version is the number of updates that it has seen.
// Every fetch names the version that it expects, so the last step's weights can never be taken for
// this step's weights. The bytes of every fetch are verified, too. A checksum of the bytes is
// computed at each write and at each read, on the thread of the queue that completes the transfer.
// A read that fails or brings other bytes is repeated once.
//
// Thread rule: the scheduler's thread calls all functions, except the blocking ones at the end. The
// blocking functions are called while no step is active. Several threads may call the blocking
// functions at once. Each thread then uses a different block, and either all threads read or all
// threads write.
// A durable store keeps several copies of each plane (engine/store/plane_copies.h). A store goes to
// a copy that no commit names, and this copy becomes home when the store has ended.
//
// Invariants, per block and plane: home(v) -> [fetches] -> home(v) -> store(v+1) -> home(v+1); a
// fetch and a store to the home never overlap. With two copies on storage, a store may go to the
// shadow, which is the copy that is not home. The home then stays at v. The shadow waits until
// adopt() makes the shadow home, or until another store overwrites it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include "base/trace/trace_ranges.h"
#include "engine/plan/layout.h"
#include "engine/run/scheduler.h"
#include "engine/store/integrity.h"
#include "engine/store/plane_copies.h"
#include "engine/store/plane_index.h"
#include "engine/store/tiers.h"
#include "engine/store/transfer_watch.h"
#include "io/io_queue.h"

namespace sluice {

// The target of a store. `kShadow` is the copy that is not home, for a tentative update.
enum class StoreTarget : std::uint8_t { kHome, kShadow };

class BlockStore;

// One transfer of one block's plane. The owner must not move the object until `done` runs.
struct Transfer {
  // The owner sets this function once. The function runs on the scheduler's thread when the
  // transfer has ended, with success or failure. After a failure, the scheduler keeps the failure,
  // and the bytes are invalid.
  std::function<void()> done;
  // The owner sets this priority before a fetch. A busy drive serves reads by this priority. All
  // writes come last.
  IoPriority read_priority = IoPriority::kNormal;
  // For an activation, the owner sets this to the activation's unit, for the trace.
  std::uint32_t activation_unit = kTraceNone;
  // The name that messages give to a transfer that is not state.
  std::string subject = {};
  // The step for traces, if the version does not tell the step.
  std::optional<std::uint64_t> step = {};

  // Used by the store.
  IoRequest request;
  BlockStore* store = nullptr;
  BlockId block{};
  Plane plane = Plane::kParameter;
  std::uint64_t version = 0;
  StoreTarget target = StoreTarget::kHome;
  std::uint8_t copy = 0;  // on storage
  std::uint64_t begin_ns = 0;
  TraceRangeId range{};
  std::optional<std::uint64_t> sum;  // of the bytes moved, if they are to be verified
  bool is_reread = false;
};

class BlockStore {
 public:
  // All arguments must outlive the store.
  BlockStore(const Config::Storage& storage, const Layout& layout, const Tiers& tiers,
             IoQueue& queue, Scheduler& scheduler);

  // Starts reading into `target` (slot-sized, kStorageAlignBytes aligned).
  // Requires: the plane's home is storage and holds `version`. On return, the read is under way.
  // The owner waits for transfer.done. Until transfer.done runs, `target` belongs to the transfer.
  void fetch(Transfer& transfer, BlockId block, Plane plane, std::byte* target,
             std::uint64_t version);
  // Starts writing `source` as `version`, which is later than the home's version. `version` is the
  // next version, unless the block has missed updates (engine/flow/late_updates.h). The other rules
  // are the same as for fetch().
  void store(Transfer& transfer, BlockId block, Plane plane, std::byte* source,
             std::uint64_t version, StoreTarget target = StoreTarget::kHome);
  // Whether store() to `target` finds a free copy that no commit names. Always true for scratch
  // state.
  bool may_store(BlockId block, Plane plane, StoreTarget target) const;
  // Starts writing a plane that is at home in memory, for a commit of a durable store. The other
  // rules are the same as for fetch().
  // Requires: may_store(). `source` holds the plane's version, and stays as it is.
  void save(Transfer& transfer, BlockId block, Plane plane, std::byte* source);
  // Makes the shadow home. The shadow has been written as the version that follows the home's
  // version.
  // Requires: no transfer of the plane is in flight.
  void adopt(BlockId block, Plane plane);
  // Discards the shadow's content, if the shadow has any.
  void drop_shadow(BlockId block, Plane plane);
  // Whether a store to the plane is in flight, so that the plane cannot be fetched.
  bool is_storing(BlockId block, Plane plane) const { return entry(block, plane).storing; }

  // Takes note that an update in place has changed the plane to `version`. Requires: the plane is
  // at home in memory.
  void advance(BlockId block, Plane plane, std::uint64_t version);
  std::uint64_t version(BlockId block, Plane plane) const { return entry(block, plane).version; }

  // Gives the watch to code that makes transfers outside of this class.
  TransferWatch& watch() { return watch_; }

  // The result is null if the state is scratch.
  PlaneCopies* copies() { return copies_ ? &*copies_ : nullptr; }
  // The plane's version on storage. For a plane at home in memory, this is the version of its last
  // save().
  std::uint64_t stored_version(BlockId block, Plane plane) const;
  // The table of the commit under way. If no commit is under way, the result is the table of the
  // valid commit. The table lists every plane with the copy that the commit names.
  std::vector<CommitPlane> committed_planes() const;
  // Sets storage to the state that a commit's table lists. Requires: the commit's store has the
  // same planes, and no transfer is in flight.
  void restore(std::span<const CommitPlane> planes);

  // Sets the version of the block's planes, for the next write or for planes in memory. The rules
  // are the same as for the blocking transfers below.
  void begin_at(BlockId block, std::uint64_t version);

  // Blocking transfers, outside of steps. Several threads may make such transfers at the same time,
  // if no two threads use the same block.
  // Fails with kIo, kDamaged or kTimeout. The message names unit, block, file, range and errno.
  void read_now(BlockId block, Plane plane, std::byte* target);
  void write_now(BlockId block, Plane plane, std::byte* source);
  // The same for both planes of a block at the same time. A plane without an address is left out.
  // If a transfer fails, the other one has ended, too.
  void read_now(BlockId block, std::byte* parameters, std::byte* record);
  void write_now(BlockId block, std::byte* parameters, std::byte* record);

  // Whether a transfer has been in flight for longer than storage.timeout. The scheduler has then
  // failed with a list of the transfers. Such a transfer may never end. So callers should wait for
  // it only if they must.
  bool is_stuck() const { return watch_.is_stuck(); }
  // Lines of text for the user, about slow transfers and repeated reads since the last call. Any
  // thread.
  std::vector<std::string> take_notes();

 private:
  struct Blocking;

  struct Entry {
    std::uint64_t version = 0;
    std::uint32_t fetches = 0;
    std::uint8_t copy = 0;    // the home among the copies on storage; PlaneCopies rules
    std::uint8_t shadow = 0;  // the shadow among them
    bool storing = false;
    bool has_shadow = false;  // the shadow holds a version
  };

  static std::optional<PlaneCopies> copies_of(const Tiers& tiers);
  void start(Transfer& transfer, BlockId block, Plane plane, IoKind kind, std::byte* data);
  void prepare(Transfer& transfer, BlockId block, Plane plane, IoKind kind, std::byte* data);
  void submit(Transfer& transfer);
  void take_sum(Transfer& transfer) const;
  void complete(Transfer& transfer);
  TraceRecord record_of(const Transfer& transfer) const;
  void trace(Transfer& transfer) const;
  void accept_write(const Transfer& transfer);
  std::optional<Error> fault_of(const Transfer& transfer) const;
  bool repeat_read(Transfer& transfer, const Error& fault);
  void transfer_now(BlockId block, IoKind kind, std::byte* parameters, std::byte* record);
  void end_blocking(std::unique_ptr<Blocking> blocking);
  const Extent& extent_of(const Transfer& transfer) const {
    return planes_.extent(transfer.block, transfer.plane, transfer.copy);
  }
  std::uint64_t stored_bytes(BlockId block, Plane plane) const;  // of a block's state
  bool is_state(Plane plane) const { return plane == Plane::kParameter || plane == Plane::kRecord; }
  std::uint8_t home_copy(std::uint32_t plane) const {
    return copies_ && planes_.is_state(plane) ? copies_->home(plane) : entries_[plane].copy;
  }
  std::uint8_t copy_to_write(std::uint32_t plane, StoreTarget target) const;
  void make_home(std::uint32_t plane, std::uint8_t copy);
  // The place of the copies' checksums in the table.
  std::uint32_t sum_index(std::uint32_t plane, std::uint8_t copy) const {
    return copy * static_cast<std::uint32_t>(entries_.size()) + plane;
  }
  std::uint32_t sum_index(const Transfer& transfer) const {
    return sum_index(planes_.index(transfer.block, transfer.plane), transfer.copy);
  }
  std::string describe(const Transfer& transfer) const;
  Error describe_damage(const Transfer& transfer, const Damage& damage) const;
  Entry& entry(BlockId block, Plane plane) { return entries_[planes_.index(block, plane)]; }
  const Entry& entry(BlockId block, Plane plane) const {
    return entries_[planes_.index(block, plane)];
  }

  const Layout& layout_;
  const Tiers& tiers_;
  IoQueue& queue_;
  Scheduler& scheduler_;
  const PlaneIndex planes_;
  std::vector<Entry> entries_;         // by plane
  std::optional<PlaneCopies> copies_;  // of the blocks' planes; empty: the state is scratch
  Integrity integrity_;                // as entries_, for each copy
  std::mutex notes_mutex_;
  std::vector<std::string> notes_;
  TransferWatch watch_;  // last: its thread describes transfers
};

}  // namespace sluice
