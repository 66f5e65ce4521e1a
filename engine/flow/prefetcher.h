// The prefetcher brings units into the device window before they are used. The prefetcher follows
// the window plan. Each block is read from storage into a parameter slot, and is then copied to the
// device. Blocks are fetched one by one, strictly in schedule order. A fetch overwrites bytes in
// the window, and starts as soon as the leases on these bytes have been released. If computation
// still reads these bytes, the device delays the copies of the fetch until this computation has
// ended. If a block has not been updated yet, the next blocks wait for this block. If the optimizer
// pass has a block in a slot, the block is copied from this slot. If ranks share the parameters,
// the prefetcher fetches the blocks of the rank's own shard, and a gather completes the unit. Each
// fetch of a unit has one gather, and the gathers come in the order of the fetches. If the home of
// a shard is the device, the shard is gathered directly from its home. If a unit is leased at its
// home, the unit needs no copy. Such a unit is ready when its update has ended.
//
// Thread rule: scheduler's thread only.
// Progress: a read waits for a parameter slot. A slot becomes free when the copies from the slot
// have ended. After a lease is released, its computation may still run, and the copies wait for
// this computation. This computation waits only for copies that come earlier in the schedule. A
// block waits for its update. The update waits for nothing in the current step. So all waits follow
// the order of the schedule, and there is no cycle.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <sluice/step_report.h>
#include "engine/flow/flow_parts.h"
#include "engine/flow/parameter_slots.h"
#include "engine/flow/resident_units.h"
#include "engine/plan/window_plan.h"
#include "engine/ranks/ranks.h"
#include "engine/run/step_timeline.h"
#include "engine/store/unit_versions.h"
#include "gpu/device/copy_runs.h"

namespace sluice {

class Prefetcher {
 public:
  struct Hooks {
    std::function<void()> on_change;             // the prefetcher has made progress
    std::function<void(UnitId)> on_final_fetch;  // the unit's last fetch of the step is done
  };

  // The target of the fetches is the window on the device. If ranks share the parameters, the
  // target also has the sequence of gathers. If `gathers` is null, each rank has complete units.
  struct Target {
    std::byte* window = nullptr;
    RankSequence* gathers = nullptr;
  };

  // All arguments must outlive the prefetcher. If there are several prefetchers, each unit belongs
  // to exactly one prefetcher.
  Prefetcher(const FlowParts& parts, ParameterSlots& slots, const ResidentUnits& residents,
             const Target& target, Hooks hooks);

  // Makes the prefetcher follow `schedule`. The prefetcher fetches the parameters as they are after
  // `version` updates. If `keeps_for_update` is true, the parameters of a block stay in their slot
  // from the step's last fetch until the update. `schedule` and `plan` must stay valid while the
  // prefetcher follows them. Requires: idle().
  void begin(const Schedule& schedule, const WindowPlan& plan, std::uint64_t version,
             bool keeps_for_update);
  // After this call, no fetch is started. The fetches under way continue, and idle() is true when
  // these fetches have ended.
  void stop();
  // Must be called after stop(). After the call, the prefetcher makes only the fetches for the uses
  // before `end`. Requires: the fetches for use number `end` and for all later uses have not begun.
  void fetch_up_to(std::uint32_t end);
  // Returns whether all fetches have ended and no further fetch will start.
  bool has_stopped() const { return is_stopped_ && idle(); }
  // Returns how far the fetches have come. A new plan begins at this point. To change the
  // schedule, call stop(), wait for has_stopped(), and call resume() with a new plan. The uses
  // before `acquired` must be the same in the old plan and in the new plan.
  WindowProgress progress(std::uint32_t acquired) const {
    return {.acquired = acquired, .fetched = next_use_, .is_partly_fetched = next_block_ != 0};
  }
  void resume(const Schedule& schedule, const WindowPlan& plan, std::uint32_t acquired);
  // Must be called after stop(). The prefetcher goes on with its plan where it has stopped.
  void go_on();
  // Called when uses have been appended to the schedule and to the plan.
  void follow_longer();

  // Called when the lease of `use` has been released. Before the call, release_event() of the unit
  // must be recorded on the stream that computed with the unit.
  void release(std::uint32_t use);

  // Starts all work that can start now.
  void pump();

  // Returns whether every copy and gather that `use` needs has been queued. If the result is true,
  // a stream that waits for ready_event() may read the unit.
  bool is_ready(std::uint32_t use) const {
    return use < ready_uses_ && (gathers_.empty() || use < gathers_.front());
  }
  // place() returns the place of the use's unit in the window. is_fetched() returns whether a fetch
  // brings the unit to this place. Any thread may call these functions while no plan is being
  // replaced.
  const std::byte* place(std::uint32_t use) const {
    return target_.window + plan_->uses[use].offset_bytes;
  }
  bool is_fetched(std::uint32_t use) const { return plan_->uses[use].fetch; }

  // Returns whether nothing is under way. The result is false while a read, a copy or a gather from
  // a home is under way. The result is also false while an issued block has not been processed, or
  // a gather has not been queued.
  bool idle() const {
    return pipeline_.empty() && copies_.empty() && gathers_.empty() && home_gathers_ == 0;
  }

  // The reason why the next use is not ready yet. If the reason is kUpdate, the use waits for an
  // update. OptimizerPass::waits_for() then tells why the update has not ended.
  WaitCause waits_for() const;

  // The event that is recorded after the unit's last copy. If the unit's home is the device, the
  // event is never recorded, and so the event counts as complete.
  EventId ready_event(UnitId unit) const { return ready_events_[index_of(unit)].id(); }
  // The stream of the copies. The gather of a unit waits for the unit's copies on this stream.
  StreamId stream() const { return copy_stream_.id(); }
  // The time at which the gather for `use` began. The result is null if no gather was needed.
  // Requires: is_ready().
  const BeginTime* gather_begun_ns(std::uint32_t use) const {
    return use < gathers_begun_ns_.size() ? &gathers_begun_ns_[use] : nullptr;
  }
  // Increases the counts in `report` by the bytes that have been gathered and copied since the last
  // call.
  void take_moved(StepReport& report) {
    report.rank_traffic.gathered_bytes += std::exchange(gathered_bytes_, 0);
    report.copies.parameter_bytes += std::exchange(copied_bytes_, 0);
  }
  // The event that the step loop records when a lease of the unit is released.
  EventId release_event(UnitId unit) const { return release_events_[index_of(unit)].id(); }

 private:
  static constexpr std::uint32_t kNoSlot = 0xffffffffu;
  static constexpr std::uint32_t kNoBlock = 0xffffffffu;
  static constexpr std::uint32_t kNoUnit = 0xffffffffu;
  static constexpr std::uint32_t kNever = 0xffffffffu;

  // An item is either a block that is being fetched for a use, or a use that needs no block.
  struct Item {
    std::uint32_t use = 0;
    std::uint32_t block = kNoBlock;
    std::uint32_t slot = kNoSlot;
    bool is_first = false;  // of its use
    bool is_last = false;   // of its use
  };
  struct Copy {
    std::uint32_t block = 0;
    std::uint32_t slot = kNoSlot;
    std::uint64_t begin_ns = 0;
    TraceRangeId range{};
    std::uint32_t unit_copied = kNoUnit;  // the unit, if this is the unit's last copy
    bool is_gated = false;                // waits for computation that still uses the place
    bool keep = false;                    // the slot's bytes are needed again
  };

  bool issue_next();
  bool may_start(std::uint32_t use);
  // The version that the block must have for the next use.
  std::uint64_t version_of(BlockId block) const { return versions_.of(layout_.block(block).unit); }
  bool is_updated(const BlockPlace& block) const;
  bool issue_block(std::uint32_t use, const BlockPlace& block, bool is_first, bool is_last);
  void finish_issue(std::uint32_t use);
  void occupy(std::uint32_t use);
  void vacate(std::uint64_t begin, std::uint64_t end);
  void process_head();
  void take_arrived();
  void copy_block(const Item& item, const BlockPlace& block);
  void request_notice();
  void copied(std::uint32_t count);
  void end_copy(std::uint64_t end_ns);
  void complete_unit(std::uint32_t use);
  void await_gathers();
  void gather_from_home(std::uint32_t use);
  void gather(std::uint32_t use, const std::byte* source, const std::vector<EventId>& events,
              const std::function<void()>& on_end);
  void gather_queued();
  void meter_copies();
  bool blocked_by(TraceReason reason, UnitId unit, std::uint32_t block = kTraceNone);
  TraceRecord resident(std::uint32_t unit, std::uint64_t end_ns) const;
  void trace_eviction(std::uint32_t unit, std::uint64_t end_ns);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  ParameterSlots& slots_;
  BlockStore& store_;
  const ResidentUnits& residents_;
  Device& device_;
  Scheduler& scheduler_;
  const UnitVersions& versions_;
  const Target target_;
  const bool is_gathering_;  // fetches shards, not complete units
  Hooks hooks_;
  std::vector<Event> ready_events_;    // by unit
  std::vector<Event> release_events_;  // by unit
  // There is one event for each unit. The event is recorded after the last copy for which the
  // unit's gather waits. Each unit needs its own event, because later copies may wait for
  // computation that runs after the unit's gather.
  std::vector<Event> shard_events_;
  Event gathered_event_;  // recorded after the gathers that precede a change of the schedule
  std::uint64_t gathered_bytes_ = 0;
  std::uint64_t copied_bytes_ = 0;
  std::deque<BeginTime> gathers_begun_ns_;  // by use; a deque's elements do not move when it grows

  // The schedule that the prefetcher follows.
  const Schedule* schedule_ = nullptr;
  const WindowPlan* plan_ = nullptr;
  std::uint64_t version_ = 0;
  std::uint32_t next_use_ = 0;    // the next use to be issued
  std::uint32_t next_block_ = 0;  // index of the next block in the unit of next_use_
  bool keeps_for_update_ = false;
  WaitCause blocked_;  // why the next block cannot be issued
  bool is_stopped_ = true;
  std::uint32_t stop_before_ = kNever;  // the prefetcher stops before this use
  std::uint32_t ready_uses_ = 0;        // uses become ready in schedule order
  std::vector<bool> released_;

  // The places in the window that hold units or are being filled. Each key is the beginning of a
  // place, and each value is the end of the place.
  std::map<std::uint64_t, std::uint64_t> occupied_;

  // The items that have been issued and not yet copied, in schedule order. There are at most
  // kPipelineItemsMax items.
  std::deque<Item> pipeline_;
  std::deque<std::uint32_t> gathers_;       // uses whose gathers have not been queued on the device
  std::uint32_t home_gathers_ = 0;          // queued on the device, until their end is reported
  std::deque<Copy> copies_;                 // queued on the device, in order
  std::uint32_t unnoticed_copies_ = 0;      // last copies in copies_; no notice is requested yet
  std::uint64_t unnoticed_slot_bytes_ = 0;  // slot bytes of the unnoticed copies
  bool is_copying_ = false;                 // the first of copies_ is assumed to be running
  std::uint64_t copying_since_ns_ = 0;
  std::vector<std::uint64_t> resident_since_ns_;  // by unit; 0 = not in the window

  Stream gather_stream_;
  Stream copy_stream_;  // its callbacks use all members above
  CopyRuns copy_runs_;  // on copy_stream_
};

}  // namespace sluice
