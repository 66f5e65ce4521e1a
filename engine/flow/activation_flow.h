// Moves boundary activations between the device's window and their homes in host memory or on
// storage, as an ActivationPlan says. A saved activation leaves the device as soon as computation
// has finished with it. Activations come back ahead of their loads, in order, as far as places in
// the window and staging slots are free. The block store transfers activations to and from storage:
// they are verified and watched, and parameters that computation waits for go first.
//
// Thread rule: the application's thread; private functions on the scheduler's thread, unless stated
// otherwise.
// Progress: a fetch starts only when the overwritten activation has been released, and is at home
// or on the way there. So the fetch's staging slot waits only for the drive and for queued copies.
// The staging slot of a store waits for enqueued computation and for the drive.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include <sluice/device.h>
#include <sluice/use.h>
#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"
#include "engine/run/step_timeline.h"
#include "engine/store/block_store.h"
#include "engine/store/tiers.h"

namespace sluice {

class ActivationFlow {
 public:
  // All arguments must outlive the flow. The flow tells `timeline` when computation waits.
  ActivationFlow(const FlowParts& parts, StepTimeline& timeline);

  // Starts to follow `plan` for `step`; the plan must outlive the flow. Requires: the previous plan
  // has been finished or abandoned.
  void begin(const ActivationPlan& plan, std::uint64_t step);
  // Makes the next access of the plan. Work enqueued on `stream` after this call may read or write
  // the activation. Blocks until the transfers are on their way to the device.
  // Fails with: kInvalidArgument when the access is not next, or too many are held; the engine's
  // first failure.
  LeasedActivation acquire(const ActivationRef& ref, ActivationAction action, StreamId stream);
  // Ends an access. Work enqueued on the stream after this call must leave the activation alone.
  void release(const LeasedActivation& lease) noexcept;
  // Fails with: kInvalidArgument when accesses of the plan are missing or still held.
  void require_complete() const;
  // Waits until no computation uses the window any more, and returns the totals since the last
  // call. Requires: the plan is complete.
  // Fails with: the engine's first failure, or the device's.
  struct Report {
    std::uint64_t out_bytes = 0;  // left the device, in whole storage units
    std::uint64_t in_bytes = 0;   // came back
  };
  Report finish();
  // Ends a plan early. Returns when no transfer is in flight and no computation uses the window any
  // more, unless the store is stuck. Ends the accesses that are held.
  void abandon() noexcept;
  // Returns when no transfer is in flight, even if the store is stuck, so that memory may then be
  // freed.
  void settle() noexcept;

 private:
  enum class StoreState : std::uint8_t { kNone, kLeaving, kHome };
  // A staging slot between device and storage, whose piece is being copied, read or written.
  struct Slot {
    Transfer transfer;
    std::uint32_t access = 0;
    std::uint32_t piece = 0;  // of its home
    bool is_free = true;
    bool is_read = false;
  };
  // An access that has been issued, or one piece of such an access. Arrivals become ready in order.
  struct Arrival {
    std::uint32_t access = 0;
    std::uint32_t slot = kNoSlot;
    bool is_last = true;
  };
  struct Store {
    std::uint32_t access = 0;
    std::uint32_t next_piece = 0;
  };
  static constexpr std::uint32_t kNoSlot = 0xffffffffu;

  // Application thread.
  void check_next(const ActivationRef& ref, ActivationAction action) const;
  std::uint32_t unit_of(std::uint32_t access) const;

  bool idle() const { return in_flight_ == 0 && stores_.empty() && arrivals_.empty(); }
  void pump();
  bool may_wait(std::uint32_t access) const {
    return access_at(access).moves || access_at(access).evicted.has_value();
  }
  bool is_over() const { return is_stopped_ || scheduler_.failed(); }
  void drop_pending();
  void start_stores();
  bool store_piece(Store& store);
  void store_to_host(std::uint32_t access);
  bool issue_next();
  bool may_start(const ActivationAccess& access) const;
  bool fetch_piece();
  void fetch_from_host();
  void process_arrivals();
  void copy_piece_up(std::uint32_t slot);
  void copied_out(std::uint32_t slot);
  void transferred(std::uint32_t slot);
  void drop_from_storage(std::uint64_t size_bytes);
  void wait_for_place(StreamId stream, std::uint32_t place);
  std::uint32_t take_slot(std::uint32_t access, std::uint32_t piece);
  void free_slot(std::uint32_t slot);
  // Runs `finished` on the scheduler's thread after the copy for `access`, which is now the last
  // work on `stream`.
  void call_back(const Stream& stream, std::uint32_t access, std::uint64_t size_bytes,
                 std::function<void()> finished);
  void trace_copy(TraceRecord record);
  std::uint32_t home_of(std::uint32_t access) const;
  std::uint32_t piece_count(std::uint32_t access) const;
  std::uint64_t piece_bytes(std::uint32_t access, std::uint32_t piece) const;
  std::byte* place_of(std::uint32_t access) const;
  const ActivationAccess& access_at(std::uint32_t access) const { return plan_->accesses[access]; }

  // Constant after construction.
  const ModelSpec& model_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  StepTimeline& timeline_;
  const std::uint32_t held_max_;  // accesses held at once, as the plans assume
  const bool is_on_storage_;
  std::vector<Event> used_events_;     // by place: after the computation that had it last
  std::vector<Event> arrived_events_;  // by place: after the last copy to it
  std::vector<Event> left_events_;     // by place: after the last copy from it
  std::vector<Event> home_events_;     // by home in host memory: after the last copy to or from it

  // Application thread only, except in begin().
  const ActivationPlan* plan_ = nullptr;
  std::uint32_t next_access_ = 0;
  std::uint32_t held_ = 0;
  std::vector<bool> is_released_;  // by access, as the application sees it
  std::vector<StreamId> streams_;  // by access
  // The two events around the wait for an access, by access; only for accesses that may need a
  // transfer.
  std::vector<Event> asked_events_;
  std::vector<Event> granted_events_;

  // Scheduler thread only, except in begin().
  std::uint32_t issued_ = 0;      // accesses
  std::uint32_t next_piece_ = 0;  // of the next access to be issued
  std::uint32_t ready_ = 0;       // accesses become ready in order
  bool is_stopped_ = true;
  std::vector<bool> released_;             // by access
  std::vector<StoreState> store_states_;   // by access that saves
  std::vector<std::uint32_t> pieces_out_;  // by access that saves: not home yet
  std::deque<Store> stores_;               // released, but not all copied out yet
  std::deque<Arrival> arrivals_;
  std::vector<Slot> slots_;
  Report moved_;
  std::uint64_t on_storage_bytes_ = 0;  // stored, and not yet loaded for the last time
  std::uint64_t step_ = 0;
  std::array<std::uint64_t, 2> copied_ns_{};  // end of the last copy up, and down
  std::uint32_t in_flight_ = 0;  // slots taken, and copies between device and homes in host memory

  Stream up_stream_;  // last: their callbacks use everything above
  Stream down_stream_;
};

}  // namespace sluice
