// The step loop runs the sequence of a step. First, units are acquired and released in the order of
// the schedule. Then the loop drains the gradients, computes their norm and the clip factor, and
// runs the optimizer pass. The loop connects the prefetcher, the gradient drain and the optimizer
// pass. These three parts use the same blocks and parameter slots. The application uses the step
// loop through leases and steps (sluice/step.h). Under every policy except serial, the optimizer
// pass continues while the next step computes.
//
// Thread rule: one application thread at a time calls the loop. The loop's parts run on the
// scheduler's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/norm_group.h>
#include <sluice/state_source.h>
#include <sluice/step_report.h>
#include <sluice/use.h>
#include "engine/flow/commits.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/gradient_drain.h"
#include "engine/flow/home_leases.h"
#include "engine/flow/lease_guard.h"
#include "engine/flow/prefetcher.h"
#include "engine/flow/state_saver.h"
#include "engine/plan/update_policy.h"
#include "engine/run/step_timeline.h"
#include "engine/step/announced_units.h"
#include "engine/step/lease_ends.h"
#include "engine/step/loss_scaler.h"
#include "engine/step/reduction_order.h"
#include "engine/step/schedule_cursor.h"
#include "engine/step/step_counts.h"
#include "engine/step/step_failure.h"
#include "engine/step/step_terms.h"
#include "engine/store/unit_versions.h"

namespace sluice {

class StepLoop {
 public:
  // All objects to which `parts` and `durable` refer must outlive the loop. If the state is not
  // durable, `durable` is null.
  explicit StepLoop(const FlowParts& parts, const CommitStart* durable = nullptr);
  ~StepLoop();
  StepLoop(const StepLoop&) = delete;
  StepLoop& operator=(const StepLoop&) = delete;

  void begin_step(const StepOptions& options);
  void begin_inference();
  // Returns when every scheduled update has been applied and the updated state has reached its
  // home.
  void drain();

  std::vector<UnitId> announce(std::span<const UnitId> units, Pass pass);
  LeasedUse acquire(UnitId unit, Pass pass, StreamId stream);
  void release(const LeasedUse& lease) noexcept;

  double gradient_norm(std::optional<double> gradient_divisor);
  StepReport finish_step(const FinishOptions& finish = {});
  // Ends a step or an inference without an update, so the state is the same as before. The call
  // also ends the leases of the step or inference. The call returns when no transfer is in flight.
  // If the store is stuck, the call does not wait for transfers.
  void abandon() noexcept;
  // Stops all work, and waits until no transfer is in flight. The call waits even if the store is
  // stuck. Memory may be freed after this call.
  void settle() noexcept;

  bool is_active() const { return cursor_.is_active(); }
  // applied_step() is the number of updates that have been applied to every block. scheduled_step()
  // also counts the update under way.
  std::uint64_t applied_step() const;
  std::uint64_t scheduled_step() const { return step_; }
  const StepTimeline& timeline() const { return timeline_; }
  StepTimeline& timeline() { return timeline_; }
  // The reference stays valid as that of StepPlans::activations() does.
  // Fails with kInvalidArgument if an option of begin_step() is not valid, or if the step is too
  // large for the activation pools.
  const ActivationPlan& activations(const StepOptions& options) {
    terms_.check("begin_step", options);  // first: the plan grows with the micro-batches
    return cursor_.plans().activations(options.micro_batches, options.order);
  }
  const ActivationPlan& inference_activations() const {
    return cursor_.plans().inference_activations();
  }
  double loss_scale() const { return scaler_.scale(); }
  // The position has no loss scale if the scale is static. Requires: every update has been applied.
  StatePosition position() const;
  // Makes the loop continue from `position`. The engine must already have the state of `position`
  // before this call. Requires: no step has begun.
  void restore(const StatePosition& position);
  Traffic predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
    return cursor_.plans().predict_traffic(micro_batches, order);
  }
  // Requires: no step is active, and Engine::set_norm_group() has checked `group`.
  void set_norm_group(NormGroup group) { norm_group_ = std::move(group); }
  // Only a durable store has commits. commit_first() makes the first commit, which has the present
  // state. commit_now() commits the last step. Each of these calls returns when every rank has the
  // commit.
  // Requires: no step is active.
  void commit_first();
  // Sets the application's text for all later commits.
  // Fails with kInvalidArgument if the text is too long.
  void set_application(const char* call, const std::string& application);
  void commit_now();
  // The last step that every rank has committed, and the application's text in this commit.
  struct Committed {
    std::optional<std::uint64_t> step;
    std::string application;
  };
  Committed committed();
  // Starts the threads that a save needs.
  // Fails with kUnsupported if no thread can be started.
  void prepare_save();
  // Begins to save the state of the last step while training continues. Requires: prepare_save()
  // has been called, no step is active, no save is under way, and the placement has save buffers.
  // `work` must exist until end_save() or settle(). If `saves_all` is false, another rank saves
  // this rank's part, and only work.finish is called.
  void begin_save(StateSaver::Work work, bool saves_all);
  // The number of blocks saved so far. If no save is under way, the result of save_count() is
  // empty.
  struct SaveCount {
    std::uint64_t saved_blocks = 0;
    std::uint64_t block_count = 0;
    bool is_over = false;
  };
  std::optional<SaveCount> save_count() const;
  // Waits until the running save has ended.
  // Fails with the failure that stops the engine.
  void await_save();
  // Requires: the save is over.
  StateSaver::End end_save();
  void set_commit_settings(const std::string& settings, std::uint64_t config_hash);
  // Throws the failure that stops the engine, if there is one.
  void throw_if_unusable() { failure_.throw_if_unusable(); }
  // Returns a failure that came after the last call, if there was one. Requires: settle() has been
  // called.
  std::optional<std::string> unheard_failure() {
    return failure_.unheard(std::exchange(has_undrained_update_, false));
  }
  // For units whose home is the device, the call fetches the shards of other ranks. Requires: these
  // units have received values.
  void share_residents();
  // Between lend_buffers() and return_buffers(), the caller uses parameter slots and lanes. During
  // this time, only the caller moves data to and from storage. Requires: no step is active.
  void lend_buffers();
  void return_buffers();

 private:
  struct UseState {
    ScheduledUse scheduled;
    Prefetcher* fetches = nullptr;  // the fetches for units of this kind
    std::uint32_t place = 0;        // the number of this use in `fetches`
    StreamId stream{};
    std::optional<std::uint32_t> gradient_slot;
    bool has_gradient_set = false;  // the gradient is computed in the gradient set
    const BeginTime* gather_begun_ns = nullptr;
    TraceRangeId range{};   // of computation under the lease
    LentUse lent = {};      // only with a guard
    bool may_stay = false;  // the lease on a pinned unit may stay while later uses come
    bool is_released = false;
    bool is_over = false;  // the flows have heard that it is released

    EventId released() const { return fetches->release_event(scheduled.unit); }
    bool has_gradient() const { return gradient_slot || has_gradient_set; }
  };

  void throw_if_active() const;
  void check_application(const char* call, const std::optional<std::string>& application) const;
  void begin();
  // The call records that a part of the loop has made progress. When all pending events have been
  // handled, the other parts of the loop may also make progress.
  void note_change() { has_changed_ = true; }
  bool pump();
  void check_acquire(UnitId unit, Pass pass) const;
  void require_fixed_schedule() const;
  void change_schedule(UnitId unit, Pass pass);
  // Stops the fetches that run ahead of computation. All ranks stop at the same use. `unit` is the
  // unit that comes next. If `unit` is empty, there is no next unit.
  WindowProgress halt_fetches(Prefetcher& fetches, std::optional<UnitId> unit, Pass pass);
  void end_schedule();
  void end_inference_together() noexcept;
  void follow(StepPlan plan);
  void describe(StepReport& report);
  void end_uses() noexcept;
  void computed(std::uint32_t use);
  // Returns the norm over all ranks and over the norm group.
  NormAccumulator agree(NormAccumulator norm, const StepOptions& options, NormCall call);
  void end_for_commit(const FinishOptions& finish);
  void await_commits();
  void count_commits_for_all();
  CommittedScale committed_scale() const;
  bool is_idle() const;
  [[noreturn]] void fail_non_finite();
  void apply(const NormAccumulator& norm, const StepTerms::End& end, StepReport& report);
  bool is_ready(std::uint32_t use);
  bool is_over();

  const Config& config_;
  const ModelSpec& model_;
  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  IoQueue& queue_;
  Device& device_;
  Scheduler& scheduler_;
  Ranks& ranks_;
  Worker& worker_;
  LeaseGuard* const guard_;  // null without memory.guard
  const UnitVersions& versions_;
  UpdatePolicy update_policy_;
  LossScaler scaler_;
  StepCounts counts_;
  ScheduleCursor cursor_;
  bool has_changed_ = false;          // scheduler's thread only
  std::unique_ptr<DeviceMath> math_;  // null if the device updates nothing
  ParameterSlots slots_;
  ResidentUnits residents_;
  Prefetcher prefetcher_;
  std::unique_ptr<AnnouncedUnits> announced_;  // null if the model has none
  WaitingGradients waiting_;
  GradientDrain drain_;
  HomeLeases home_leases_;
  std::unique_ptr<Commits> commits_;  // null if the state is scratch
  StateSaver saver_;
  OptimizerPass pass_;
  StepFailure failure_;
  NormGroup norm_group_;  // without a function: no group

  // The step under way:
  StepTerms terms_;
  std::uint32_t leases_held_ = 0;
  std::uint32_t acquired_ = 0;           // scheduled uses and announced uses
  std::uint32_t acquired_together_ = 0;  // the same, without uses of this rank alone
  ReductionOrder reductions_;
  std::vector<UseState> uses_;  // in the order in which they are acquired
  // The acquired uses of whose ends the flows have not heard yet, in the order of the uses.
  std::vector<std::uint32_t> open_uses_;
  LeaseEnds lease_ends_;
  std::uint32_t votes_ = 0;         // the number of votes about announcements
  std::vector<Event> vote_events_;  // before and after the votes
  StepTimeline timeline_;
  OverlapPolicy policy_ = OverlapPolicy::kSerial;

  std::uint64_t step_ = 0;             // the number of scheduled updates
  std::string application_;            // the application's last text
  bool has_undrained_update_ = false;  // the update's copies to the device may have failed
};

}  // namespace sluice
