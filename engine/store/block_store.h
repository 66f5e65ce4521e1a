// A block store keeps the blocks of the state on storage. A caller names a block, a plane and a
// version, and the store makes the transfer in an IoQueue. The store keeps a table of the planes'
// versions. A block's version is the number of updates that the block has seen. Every fetch names
// the version that it expects. So a caller can never get the weights of the last step instead of
// the weights of this step. The bytes of every fetch are verified, too. The queue's thread that
// completes a write or a read also computes a checksum of the bytes. If a read fails, or if its
// bytes do not match the checksum, the read is repeated once.
//
// Thread rule: the scheduler's thread calls all functions, except the blocking functions at the end
// of the class. The blocking functions may be called only while no step is active. Several threads
// may call the blocking functions at the same time, if each thread uses a different block. At any
// time, these threads must either all read or all write.
//
// A durable store keeps several copies of each plane (engine/store/plane_copies.h). A call of
// store() writes to a copy that no commit names. When the write has ended, this copy becomes the
// home.
//
// Invariants, per block and plane: home(v) -> [fetches] -> home(v) -> store(v+1) -> home(v+1); a
// read of the home and a write to the home never overlap. With two copies on storage, store() may
// write to the shadow, which is the copy that is not the home. In this case, the home stays at
// version v. The shadow stays unused until adopt() turns the shadow into the home, or until another
// write replaces the shadow's content.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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

// The copy to which store() writes. `kShadow` is the copy that is not the home. Tentative updates
// are written to the shadow.
enum class StoreTarget : std::uint8_t { kHome, kShadow };

class BlockStore;

// One transfer of one block's plane. The owner must not move the object until `done` runs.
struct Transfer {
  // A function that the owner sets once. The function runs on the scheduler's thread when the
  // transfer has succeeded or failed. If the transfer has failed, the scheduler has the error, and
  // the bytes are invalid.
  std::function<void()> done;
  // The owner sets this priority before a fetch. A busy drive serves read requests in the order of
  // their priorities, and serves all write requests last.
  IoPriority read_priority = IoPriority::kNormal;
  // The unit of the activation that the transfer moves. The owner sets this field for the trace.
  std::uint32_t activation_unit = kTraceNone;
  // The name of the transfer in messages. The owner sets this name if the transfer moves something
  // other than state.
  std::string subject = {};
  // The step that a trace shows for the transfer. This field is needed if the step does not follow
  // from the version.
  std::optional<std::uint64_t> step = {};

  // Only the store uses the members below.
  IoRequest request;
  BlockStore* store = nullptr;
  BlockId block{};
  Plane plane = Plane::kParameter;
  std::uint64_t version = 0;
  StoreTarget target = StoreTarget::kHome;
  std::uint8_t copy = 0;  // on storage
  std::uint64_t begin_ns = 0;
  TraceRangeId range{};
  std::optional<std::uint64_t> sum;  // of the bytes moved; empty if not verified
  bool is_reread = false;
};

class BlockStore {
 public:
  // All arguments must outlive the store.
  BlockStore(const Config::Storage& storage, const Layout& layout, const Tiers& tiers,
             IoQueue& queue, Scheduler& scheduler);

  // Starts to read the plane into `target`. `target` must be as large as a slot, and aligned to
  // kStorageAlignBytes. Requires: the plane's home is on storage and holds `version`. On return,
  // the read is under way. The read ends when transfer.done runs. Until then, `target` belongs to
  // the transfer.
  void fetch(Transfer& transfer, BlockId block, Plane plane, std::byte* target,
             std::uint64_t version);
  // Starts to write the bytes of `source` as version `version` of the plane. Usually, `version` is
  // the home's version plus one. If the block has missed updates (engine/flow/late_updates.h),
  // `version` exceeds the home's version by more than one. The other rules are the same as for
  // fetch().
  void store(Transfer& transfer, BlockId block, Plane plane, std::byte* source,
             std::uint64_t version, StoreTarget target = StoreTarget::kHome);
  // Whether store() can write to `target` now. A write needs a free copy of the plane, and no
  // commit may name this copy. For scratch state, the result is always true.
  bool may_store(BlockId block, Plane plane, StoreTarget target) const;
  // Starts to write a plane whose home is in memory. The write is for a commit of a durable store.
  // The other rules are the same as for fetch().
  // Requires: may_store(). `source` holds the plane's current version, and does not change during
  // the transfer.
  void save(Transfer& transfer, BlockId block, Plane plane, std::byte* source);
  // Turns the shadow into the plane's home.
  // Requires: the shadow holds the version that follows the home's version, and no transfer of the
  // plane is in flight.
  void adopt(BlockId block, Plane plane);
  // Discards the content of the shadow, if there is any.
  void drop_shadow(BlockId block, Plane plane);
  // Whether a write to the plane is in flight. In this case, the plane cannot be fetched.
  bool is_storing(BlockId block, Plane plane) const { return entry(block, plane).storing; }

  // Sets the plane's version to `version`. Must be called after each update that changes the plane
  // in place.
  // Requires: the plane's home is in memory.
  void advance(BlockId block, Plane plane, std::uint64_t version);
  std::uint64_t version(BlockId block, Plane plane) const { return entry(block, plane).version; }

  // The watch of the transfers. Other classes use the watch for their own transfers, too.
  TransferWatch& watch() { return watch_; }

  // The copies of the planes on storage. The result is null if the state is scratch.
  PlaneCopies* copies() { return copies_ ? &*copies_ : nullptr; }
  // The plane's version on storage. If the plane's home is in memory, the result is the version
  // that the plane's last save() has written.
  std::uint64_t stored_version(BlockId block, Plane plane) const;
  // Returns the table of planes of the commit that is under way. If no commit is under way, the
  // result is the table of the valid commit. The table lists every plane, with the copy that the
  // commit names.
  std::vector<CommitPlane> committed_planes() const;
  // `planes` is the table of a commit. The copies that this table names become the homes.
  // Requires: the commit's store has the same planes as this store, and no transfer is in flight.
  void restore(std::span<const CommitPlane> planes);

  // Sets the version of the block's planes. The next write_now() stores this version. A plane in
  // memory gets this version immediately. The thread rules are the same as for the blocking
  // transfers below.
  void begin_at(BlockId block, std::uint64_t version);

  // These transfers block the calling thread, and are for the time between steps. Several threads
  // may make such transfers at the same time, if no two threads use the same block.
  // Fails with kIo, kDamaged or kTimeout. The message names unit, block, file, range and errno.
  void read_now(BlockId block, Plane plane, std::byte* target);
  void write_now(BlockId block, Plane plane, std::byte* source);
  // These functions transfer both planes of a block at the same time. If the address of a plane is
  // null, this plane is not transferred. If one transfer fails, the call still waits until the
  // other transfer has ended.
  void read_now(BlockId block, std::byte* parameters, std::byte* record);
  void write_now(BlockId block, std::byte* parameters, std::byte* record);

  // Whether a transfer has been in flight for longer than storage.timeout. In this case, the
  // scheduler has failed with an error that lists the transfers. A stuck transfer may never end. So
  // callers should avoid waiting for a stuck transfer.
  bool is_stuck() const { return watch_.is_stuck(); }
  // Whether a block of the state could not be read back. The scheduler has then failed.
  bool has_lost_state() const { return has_lost_state_; }
  // Returns lines of text for the user. The lines describe slow transfers and repeated reads since
  // the last call. Any thread may call this function.
  std::vector<std::string> take_notes() { return watch_.take_notes(); }
  // Returns the bytes of which checksums have been computed since the last call.
  std::uint64_t take_checksum_bytes() { return checksum_bytes_.exchange(0); }

 private:
  struct Blocking;

  struct Entry {
    std::uint64_t version = 0;
    std::uint32_t fetches = 0;
    std::uint8_t copy = 0;    // the copy that is the home, unless copies_ knows it
    std::uint8_t shadow = 0;  // the copy that is the shadow
    bool storing = false;
    bool has_shadow = false;  // the shadow holds a version
  };

  static std::optional<PlaneCopies> copies_of(const Tiers& tiers);
  void start(Transfer& transfer, BlockId block, Plane plane, IoKind kind, std::byte* data);
  void prepare(Transfer& transfer, BlockId block, Plane plane, IoKind kind, std::byte* data);
  void submit(Transfer& transfer);
  void take_sum(Transfer& transfer);
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
  // The index of a copy's checksum in `integrity_`.
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
  Integrity integrity_;                // by sum_index()
  bool has_lost_state_ = false;
  std::atomic<std::uint64_t> checksum_bytes_ = 0;
  TransferWatch watch_;  // last: its thread describes transfers
};

}  // namespace sluice
