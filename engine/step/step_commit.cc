// The part of the step loop that deals with the commits of a durable store, and with checkpoints
// that are written beside training.
#include <array>

#include <fmt/format.h>

#include "base/utf8.h"
#include "engine/step/step_loop.h"

namespace sluice {

void StepLoop::check_application(const char* call,
                                 const std::optional<std::string>& application) const {
  if (!application) return;
  const auto refuse = [call](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
  };
  if (application->size() > kApplicationBytesMax)
    refuse(
        fmt::format("the application's text has {} B, but a commit has room for {} B; keep larger "
                    "data in a file, and its path here",
                    application->size(), kApplicationBytesMax));
  if (is_utf8(*application)) return;
  // A store may hold other bytes from an earlier version, and goes on with them.
  bool is_committed = false;
  if (commits_) scheduler_.run([&] { is_committed = *application == commits_->application(); });
  if (!is_committed)
    refuse(
        fmt::format("the application's text of {} B is not UTF-8, as the text of a checkpoint has "
                    "to be; give other data as text, such as base64",
                    application->size()));
}

void StepLoop::set_application(const char* call, const std::string& application) {
  check_application(call, application);
  application_ = application;
}

CommittedScale StepLoop::committed_scale() const {
  const LossScaleState& state = scaler_.state();
  return {.scale = state.scale,
          .good_steps = state.good_steps,
          .hysteresis_left = state.hysteresis_left};
}

// The step has been finished, and will be applied.
void StepLoop::end_for_commit(const FinishOptions& finish) {
  if (!commits_) return;
  if (finish.application) application_ = *finish.application;
  scheduler_.run([this] {
    commits_->finished({.step = step_, .scale = committed_scale(), .application = application_});
  });
}

// Waits for the commits of all steps that are over, where ranks wait for each other's.
void StepLoop::await_commits() {
  if (!commits_ || !ranks_.are_several()) return;
  failure_.await([this] {
    timeline_.waits_for(kTraceNone, {.reason = TraceReason::kCommit});
    return commits_->is_durable();
  });
}

// Requires: this rank's commits are durable.
void StepLoop::count_commits_for_all() {
  if (ranks_.are_several()) {
    std::uint64_t own = 0;
    scheduler_.run([&] { own = commits_->durable_step().value_or(0); });
    std::array ranges{RankRange(own)};
    ranks_.all_reduce({}, ranges, "a commit");
    SLUICE_CHECK(ranges[0].is_equal(), "ranks commit the same steps");
  }
  scheduler_.run([this] { commits_->count_for_all(); });
}

void StepLoop::commit_first() {
  scheduler_.run([this] {
    commits_->want_first({.step = step_, .scale = committed_scale(), .application = application_});
  });
  failure_.await([this] { return commits_->is_durable(); });
  count_commits_for_all();
}

void StepLoop::commit_now() {
  scheduler_.run([this] { pass_.catch_up(); });
  drain();
  failure_.await([this] { return commits_->is_durable(); });
  count_commits_for_all();
  scheduler_.run([this] { commits_->want_now(); });
  failure_.await([this] { return commits_->is_durable(); });
  count_commits_for_all();
}

StepLoop::Committed StepLoop::committed() {
  Committed committed;
  scheduler_.run([&] {
    committed = {.step = commits_->durable_step(), .application = commits_->application()};
  });
  return committed;
}

void StepLoop::lend_buffers() {
  scheduler_.run([this] { pass_.catch_up(); });
  drain();
  // The lanes of an abandoned or skipped step may still read ahead, into these buffers.
  failure_.await([this] { return pass_.idle(); });
  counts_.pause();
  scheduler_.run([this] { slots_.drop_kept(); });
}

void StepLoop::return_buffers() {
  counts_.resume();
}

void StepLoop::prepare_save() {
  scheduler_.run([this] { saver_.prepare(); });
}

void StepLoop::begin_save(StateSaver::Work work, bool saves_all) {
  scheduler_.run([this] { pass_.catch_up(); });
  scheduler_.run([&] {
    saver_.begin(step_, saves_all ? pass_.blocks_in_order() : std::vector<BlockId>(),
                 std::move(work));
  });
}

std::optional<StepLoop::SaveCount> StepLoop::save_count() const {
  std::optional<SaveCount> count;
  scheduler_.run([&] {
    if (saver_.is_under_way())
      count = {.saved_blocks = saver_.saved_count(),
               .block_count = saver_.block_count(),
               .is_over = saver_.is_over()};
  });
  return count;
}

void StepLoop::await_save() {
  failure_.await([this] { return saver_.is_over(); });
}

StateSaver::End StepLoop::end_save() {
  StateSaver::End end;
  scheduler_.run([&] { end = saver_.end(); });
  if (end.failure) return end;
  // Updates and copies on the device end without saying that they have failed.
  try {
    failure_.throw_if_device_failed();
  } catch (const Error& error) {
    end.failure = error;
  } catch (const std::exception& error) {
    end.failure = Error(ErrorCode::kInternal, error.what());
  }
  return end;
}

void StepLoop::set_commit_settings(const std::string& settings, std::uint64_t config_hash) {
  scheduler_.run([&] { commits_->set_settings(settings, config_hash); });
}

}  // namespace sluice
