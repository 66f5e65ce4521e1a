// This class makes the transfers of an activation flow. The transfers are all the copies, reads and
// writes that an ActivationPlan requires. If a saved activation has to leave the device, the
// activation leaves as soon as computation no longer uses it. An activation is brought back before
// the application loads it. Activations come back in the order in which the application loads them.
// An activation comes back as soon as its place in the window and a staging slot are free. The
// block store moves activations to and from storage, and verifies and watches these transfers. If
// computation waits for parameters, the copies of these parameters have priority over the copies of
// activations.
//
// Thread rule: functions run on the scheduler's thread, unless their comments say otherwise.
// Progress: a fetch overwrites an activation in the window. The fetch starts only after the
// overwritten activation has been released. If the overwritten activation is still needed, the
// fetch also waits until the transfer of this activation to its home has begun. So a fetch holds
// its staging slot only until the drive and the queued copies have finished. A transfer to storage
// holds its staging slot until the enqueued computation and the drive have finished.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <sluice/device.h>
#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"
#include "engine/store/block_store.h"
#include "engine/store/tiers.h"

namespace sluice {

struct ActivationReport {
  std::uint64_t out_bytes = 0;  // bytes moved out of the device, in whole storage units
  std::uint64_t in_bytes = 0;   // bytes moved back
};

class ActivationTransfers {
 public:
  // `parts` must outlive the object.
  explicit ActivationTransfers(const FlowParts& parts);

  // Begins the transfers that `plan` requires in `step`. The plan must outlive the object.
  // Requires: idle().
  void begin(const ActivationPlan& plan, std::uint64_t step);
  // Called when the application has released the access.
  void release(std::uint32_t access);
  // Whether the access has been issued, and its transfers are on their way to the device.
  bool is_ready(std::uint32_t access) const { return access < ready_; }
  // From now on, the object starts no more transfers, and drops the transfers that have not
  // started.
  void stop();
  // Whether no transfer is in flight.
  bool idle() const { return in_flight_ == 0 && stores_.empty() && arrivals_.empty(); }
  // Returns true if a transfer is stuck and might not end.
  bool is_stuck() const { return store_.is_stuck(); }
  // Forgets the activations that are on storage. No later call may load these activations.
  // Requires: idle(), or is_stuck().
  void drop_stored() { drop_from_storage(on_storage_bytes_); }
  // The bytes that have been moved since the last call. Any thread may call this function while
  // idle() is true.
  ActivationReport take_moved() { return std::exchange(moved_, {}); }

  // Until the next begin(), any thread may call the functions below.
  //
  // After this call, work that is enqueued on `stream` waits until the access's place in the window
  // may be used. Requires: is_ready().
  void wait_until_usable(StreamId stream, std::uint32_t access);
  // The caller must record this event after the computation that uses the place of the access.
  EventId used_event(std::uint32_t access) const;
  // The list has one event for each place in the window. used_event() returns the event of one
  // place.
  std::span<const Event> used_events() const { return used_events_; }
  std::byte* place_of(std::uint32_t access) const;
  // The unit that computes the activation.
  std::uint32_t unit_of(std::uint32_t access) const;

 private:
  enum class StoreState : std::uint8_t { kNone, kLeaving, kHome };
  // A staging slot between device and storage. The slot holds a piece of an activation while the
  // piece is copied, read or written.
  struct Slot {
    Transfer transfer;
    std::uint32_t access = 0;
    std::uint32_t piece = 0;  // index of the piece in the activation's home
    bool is_free = true;
    bool is_read = false;
  };
  // An issued access, or one piece of an issued access. Arrivals become ready in the order of the
  // accesses.
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

  void pump();
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
  // Runs `finished` on the scheduler's thread when the copy for `access` has ended. Requires: this
  // copy is the last work on `stream`.
  void call_back(const Stream& stream, std::uint32_t access, std::uint64_t size_bytes,
                 std::function<void()> finished);
  void trace_copy(TraceRecord record);
  std::uint32_t home_of(std::uint32_t access) const;
  std::uint32_t piece_count(std::uint32_t access) const;
  std::uint64_t piece_bytes(std::uint32_t access, std::uint32_t piece) const;
  const ActivationAccess& access_at(std::uint32_t access) const { return plan_->accesses[access]; }

  // Constant after construction.
  const ModelSpec& model_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  const bool is_on_storage_;
  std::vector<Event> used_events_;     // by place: marks the last computation that used it
  std::vector<Event> arrived_events_;  // by place: marks the last copy to it
  std::vector<Event> left_events_;     // by place: marks the last copy from it
  std::vector<Event> home_events_;     // by home in host memory: marks the last copy to or from it

  const ActivationPlan* plan_ = nullptr;
  std::uint32_t issued_ = 0;      // number of issued accesses
  std::uint32_t next_piece_ = 0;  // index of the next piece, in the access that is issued next
  std::uint32_t ready_ = 0;       // number of ready accesses; they become ready in order
  bool is_stopped_ = true;
  std::vector<bool> released_;             // by access
  std::vector<StoreState> store_states_;   // by access that saves
  std::vector<std::uint32_t> pieces_out_;  // by access that saves: pieces not yet at home
  std::deque<Store> stores_;               // of released accesses that have pieces to copy out
  std::deque<Arrival> arrivals_;
  std::vector<Slot> slots_;
  ActivationReport moved_;
  std::uint64_t on_storage_bytes_ = 0;  // stored bytes that a later load still needs
  std::uint64_t step_ = 0;
  std::array<std::uint64_t, 2> copied_ns_{};  // when the last copy up and the last copy down ended
  std::uint32_t in_flight_ = 0;  // used slots, plus copies between device and homes on the host

  Stream up_stream_;  // last members, because their callbacks use all others
  Stream down_stream_;
};

}  // namespace sluice
