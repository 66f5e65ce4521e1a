// The end of a step: the last gradients, the agreement of all ranks, and the update.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include <fmt/format.h>

#include "base/trace/trace_recorder.h"
#include "engine/plan/sharding.h"
#include "engine/run/worker.h"
#include "engine/step/step_loop.h"

namespace sluice {
namespace {

void describe_times(const StepTimes& times, StepReport& report) {
  report.times = times;
  report.stall_ns = times.stall_ns;
  report.stall_for_update_ns = times.stall_for_update_ns;
}

}  // namespace

double StepLoop::gradient_norm(std::optional<double> gradient_divisor) {
  failure_.throw_if_unusable();
  cursor_.require_gradients("gradient_norm", leases_held_);
  StepOptions options = terms_.options();
  if (gradient_divisor) options.gradient_divisor = gradient_divisor;
  terms_.check("gradient_norm", options);
  if (ranks_.are_several() && !cursor_.is_over() &&
      !reduces_each_use(ranks_.shard(), options.micro_batches, options.order))
    throw Error(ErrorCode::kUnsupported,
                fmt::format("gradient_norm: the schedule expects {} next: with several ranks at "
                            "sharding.stage 0 or 1, gradients of {} micro-batches are added up at "
                            "the end; ask for the norm behind the last backward use",
                            cursor_.describe(cursor_.next()), options.micro_batches));
  scheduler_.run([this] { drain_.measure(); });
  failure_.await([this] { return drain_.is_measured(); });
  failure_.throw_if_device_failed();
  const NormAccumulator norm = agree(drain_.norm_so_far(), options, NormCall::kBefore);
  if (!norm.finite()) return std::numeric_limits<double>::quiet_NaN();
  return std::sqrt(norm.sum_of_squares()) / terms_.gradient_count(options, scaler_.scale());
}

StepReport StepLoop::finish_step(const FinishOptions& finish) {
  failure_.throw_if_unusable();
  cursor_.require_gradients("finish", leases_held_);
  if (announced_) announced_->require_over();
  check_application("finish", finish.application);
  const StepTerms::End end = terms_.end(finish, policy_);
  const TraceRange range({.kind = TraceKind::kFinish});
  const std::uint64_t begin_ns = steady_now_ns();
  if (!cursor_.is_over()) end_schedule();
  cursor_.take_no_more();
  timeline_.ends(uses_[acquired_ - 1].released());
  failure_.await([this] { return is_over(); });
  lease_ends_.await(device_);  // the window's bytes may be overwritten next
  failure_.throw_if_device_failed();
  if (ranks_.are_several() || norm_group_.add)
    scheduler_.run(
        [this] { timeline_.waits_for(kTraceNone, {.reason = TraceReason::kCollective}); });
  await_commits();  // of the steps before: the vote tells others that this rank has them
  const NormAccumulator norm = agree(drain_.norm(), end.options, NormCall::kFinish);
  scheduler_.run([this] { timeline_.ready(); });
  StepReport report;
  report.policy = policy_;
  report.loss_scale = scaler_.scale();
  const std::uint64_t pass_begin_ns = steady_now_ns();
  if (norm.finite()) {
    apply(norm, end, report);
  } else if (config_.optimizer.non_finite == NonFinitePolicy::kSkip) {
    report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
    report.skipped = true;
    // First, because it may refuse: the step has to be as it was if the application asks again.
    scaler_.update(/*has_overflowed=*/true);
    scheduler_.run([this] {
      pass_.cancel();
      waiting_.drop_step();
    });
  } else {
    fail_non_finite();
  }
  if (!report.skipped) {
    scaler_.update(/*has_overflowed=*/false);
    end_for_commit(finish);
  }
  update_policy_.note(report.skipped || report.clip_factor < 1);
  report.step = step_;
  report.optimizer_ns = static_cast<std::int64_t>(steady_now_ns() - pass_begin_ns);
  WorkTimes work;
  scheduler_.run([&] {
    report.notes = store_.take_notes();
    work = scheduler_.work().take();
    report.buffers = scheduler_.pools().take();
  });
  describe_times(timeline_.finish(begin_ns, work), report);
  report.times.work_before = counts_.take_work_before();
  describe(report);
  cursor_.end(/*is_example=*/true);
  return report;
}

void StepLoop::describe(StepReport& report) {
  report.drives = counts_.take_traffic();
  for (const DriveTraffic& drive : report.drives) {
    report.nvme_read_bytes += drive.read_bytes;
    report.nvme_write_bytes += drive.write_bytes;
  }
  scheduler_.run([&] {
    report.rank_traffic = ranks_.take_traffic();
    report.rank_traffic.gathered_bytes += residents_.take_gathered_bytes();
    prefetcher_.take_moved(report);
    if (announced_) announced_->take_moved(report);
    report.copies.gradient_bytes = drain_.take_copied_bytes();
    report.copies.update_bytes = pass_.take_copied_bytes();
    report.late_update_bytes = pass_.take_late_bytes();
    report.memory.zero_bytes = drain_.take_zero_bytes();
  });
  const TouchedBytes touched = worker_.optimizer().take_touched_bytes();
  report.memory.update_bytes = touched.update;
  report.memory.copy_bytes = report.copies.size_bytes() * (device_.has_own_memory() ? 1 : 2);
  report.memory.sum_bytes = touched.sum;
  report.memory.norm_bytes = touched.norm;
  report.memory.checksum_bytes = store_.take_checksum_bytes();
  report.rank_traffic.crossed_bytes += ranks_.crossing_bytes(report.rank_traffic.gathered_bytes);
  report.schedule_changes = cursor_.changes();
  if (announced_) {
    report.announced_uses = announced_->count();
    report.announced_read_bytes = announced_->read_bytes();
    report.announced_update_bytes = announced_->update_bytes();
  }
  if (cursor_.changes() != 0)
    report.notes.push_back(
        fmt::format("step {}: units were not used as scheduled ({} changes, each a wait); the next "
                    "such step is expected to go like this one",
                    step_, cursor_.changes()));
  if (const std::uint32_t units = drain_.units_without_gradient(); units != 0)
    report.notes.push_back(fmt::format("step {}: {} of {} units were not used in backward; {}",
                                       step_, units, layout_.units().size(),
                                       config_.optimizer.untouched == UntouchedPolicy::kSkip
                                           ? "they stay as they are"
                                           : "their gradient was taken to be zero"));
}

// The norm is known: runs the update, or the rest of it.
void StepLoop::apply(const NormAccumulator& norm, const StepTerms::End& end, StepReport& report) {
  report.gradient_norm =
      std::sqrt(norm.sum_of_squares()) / terms_.gradient_count(end.options, scaler_.scale());
  report.clip_factor = update_policy_.clip_factor(report.gradient_norm);
  const bool as_assumed = end.is_announced && report.clip_factor == 1 && !drain_.was_reopened();
  report.redone = policy_ == OverlapPolicy::kSpeculative && !as_assumed;
  const UnitCoefficients known = terms_.coefficients(
      end.options,
      {.step = step_ + 1, .loss_scale = scaler_.scale(), .clip_factor = report.clip_factor},
      versions_.all());
  has_undrained_update_ = true;
  scheduler_.run([&] { report.untouched_units = pass_.apply(known, as_assumed); });
  ++step_;
  if (policy_ == OverlapPolicy::kSerial) drain();
}

// Nothing has been updated, except under the eager policy.
void StepLoop::fail_non_finite() {
  bool is_partial = false;
  scheduler_.run([&] { is_partial = pass_.is_partial(); });
  const std::string outcome =
      is_partial ? "blocks have been updated with other gradients by then (optimizer.overlap eager)"
                 : "nothing was updated";
  throw Error(
      ErrorCode::kNonFinite,
      fmt::format("{} in step {}; {}. Lower the learning rate, or set optimizer.non_finite "
                  "to \"skip\"",
                  drain_.norm().finite() ? "a gradient of another rank's shard is not finite"
                                         : drain_.describe_non_finite(),
                  step_ + 1, outcome));
}

}  // namespace sluice
