// Brings units into the device window ahead of their use, as the window plan says: storage ->
// staging slot -> copy to the device, block by block and strictly in schedule order. A fetch starts
// as soon as the leases on the bytes that it overwrites have been released; its copies wait on the
// device for the computation that still reads them.
//
// Thread rule: scheduler's thread only.
// Progress: a read waits for a staging slot; slots are freed by copies; copies wait for computation
// under released leases, which waits only for copies earlier in the schedule. The order is the same
// everywhere, so there is no cycle.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/block_store.h"
#include "engine/window_plan.h"

namespace sluice {

class Prefetcher {
 public:
  // All must outlive the prefetcher.
  Prefetcher(const Layout& layout, const Placement& placement, const Tiers& tiers,
             BlockStore& store, Device& device, Scheduler& scheduler);

  // Starts on a schedule at `version` of the parameters. Both arguments must outlive it; the
  // prefetcher is idle() before.
  void begin(const Schedule& schedule, const WindowPlan& plan, std::uint64_t version);
  // Starts no more fetches. What is under way ends; wait for idle().
  void stop();

  // The lease of `use` is released and release_event() of its unit recorded on the stream that
  // computed with it.
  void release(std::uint32_t use);

  // Every copy that `use` needs has been queued: a stream that waits for ready_event() may then
  // read the unit.
  bool is_ready(std::uint32_t use) const { return use < ready_uses_; }

  // No read, copy or unprocessed block is left.
  bool idle() const { return pipeline_.empty() && copies_in_flight_ == 0; }

  // Recorded behind a unit's last copy; never, and so complete, for a unit homed on the device,
  // which the optimizer pass updates between steps.
  EventId ready_event(UnitId unit) const { return ready_events_[index_of(unit)].id(); }
  // For the step loop to record when a lease is released.
  EventId release_event(UnitId unit) const { return release_events_[index_of(unit)].id(); }

 private:
  static constexpr std::uint32_t kNoSlot = 0xffffffffu;
  static constexpr std::uint32_t kNoBlock = 0xffffffffu;

  // One block of one use on its way, or, without a block, a use that needs nothing.
  struct Item {
    std::uint32_t use = 0;
    std::uint32_t block = kNoBlock;
    std::uint32_t staging_slot = kNoSlot;
    bool is_first = false;  // of its use
    bool is_last = false;   // of its use
    bool has_arrived = false;
  };
  struct StagingSlot {
    Transfer transfer;
    std::uint64_t item = 0;  // sequence number in the pipeline
    std::uint64_t copy_begin_ns = 0;
    bool is_free = true;
  };

  void pump();
  bool issue_next();
  bool may_start(std::uint32_t use) const;
  bool issue_block(std::uint32_t use, const BlockPlace& block, bool is_first, bool is_last);
  void process_head();
  void copy_block(const Item& item, const BlockPlace& block);
  void arrived(std::uint32_t slot);
  void copied(std::uint32_t slot);
  std::uint32_t take_slot();

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  std::vector<Event> ready_events_;    // by unit
  std::vector<Event> release_events_;  // by unit
  std::vector<StagingSlot> slots_;

  // The schedule being worked on.
  const Schedule* schedule_ = nullptr;
  const WindowPlan* plan_ = nullptr;
  std::uint64_t version_ = 0;
  std::uint32_t next_use_ = 0;    // to be issued
  std::uint32_t next_block_ = 0;  // of next_use_, counted in its unit
  bool is_stopped_ = true;
  std::uint32_t ready_uses_ = 0;  // uses become ready in schedule order
  std::vector<bool> released_;

  // Issued and not yet copied, in schedule order; bounded by kPipelineItemsMax.
  std::deque<Item> pipeline_;
  std::uint64_t head_item_ = 0;  // sequence number of pipeline_.front()
  std::uint32_t copies_in_flight_ = 0;

  Stream copy_stream_;  // last: its callbacks use all of the above
};

}  // namespace sluice
