#include "engine/flow/commits.h"

#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/plan/commit_turn.h"

namespace sluice {

Commits::Commits(const CommitStart& start, const FlowParts& parts, std::function<void()> on_change)
    : store_(parts.store),
      scheduler_(parts.scheduler),
      device_(parts.device),
      probe_(parts.device),
      on_change_(std::move(on_change)),
      record_(start.record),
      next_slot_(start.next_slot),
      next_generation_(start.next_generation),
      commit_every_(start.commit_every),
      has_others_(start.has_others),
      data_file_count_(static_cast<std::uint32_t>(start.files->data.size())),
      begun_step_(start.record.step),
      saver_(parts, {.may_store = [this](std::uint64_t step) { return may_store(step); },
                     .saved = [this](std::uint64_t step) { ++saved_[step]; },
                     .on_change = [this] { on_change_(); }}),
      writer_(
          parts.queue, *start.files,
          [&scheduler = parts.scheduler](std::function<void()> task) {
            scheduler.post(std::move(task));
          },
          &parts.store.watch()) {
  const auto* const text = reinterpret_cast<const char*>(record_.application.data());
  last_ = {.step = record_.step,
           .scale = record_.scale,
           .application = std::string(text, record_.application.size())};
  if (!record_.planes.empty()) {
    durable_step_ = record_.step;
    durable_application_ = last_.application;
  }
  record_.planes.clear();
}

bool Commits::may_store(std::uint64_t step) const {
  if (step == 0) return true;
  const std::uint64_t last_due = (step - 1) / commit_every_ * commit_every_;
  return last_due <= begun_step_;
}

void Commits::updated(BlockId block, std::uint64_t step) {
  if (is_due(step) && saver_.is_at_home(block)) saver_.add(block, step);
}

// A save under way is for an earlier commit, and brings the block as it is.
void Commits::left(BlockId block, std::uint64_t step) {
  if (!is_due(step) || !saver_.is_at_home(block)) return;
  if (saver_.is_outdated(block) && !saver_.is_saving(block)) return saver_.add(block, step);
  ++saved_[step];
}

void Commits::finished(StepEnd end) {
  const std::uint64_t now_ns = steady_now_ns();
  if (finished_ns_ != 0) step_ns_ = now_ns - finished_ns_;
  finished_ns_ = now_ns;
  last_ = end;
  if (is_due(end.step)) wanted_.push_back({.end = std::move(end)});
  on_change_();
}

void Commits::want_now() {
  const bool has_begun = durable_step_.has_value() && begun_step_ == last_.step;
  if (has_begun || (!wanted_.empty() && wanted_.back().end.step == last_.step)) return;
  saver_.add_outdated(last_.step);
  wanted_.push_back({.end = last_, .is_now = true});
  on_change_();
}

void Commits::want_first(StepEnd end) {
  last_ = std::move(end);
  wanted_.push_back({.end = last_, .is_now = true});
  on_change_();
}

void Commits::count_for_all() {
  if (!store_.copies()->is_committing() || !writer_.is_idle()) return;
  store_.copies()->end_commit();
  on_change_();
}

void Commits::hold(std::uint64_t step, std::uint32_t uses) {
  const bool is_known = flush_ns_ != 0 && step_ns_ != 0;
  if (has_others_ ||
      (is_known && !commit_may_wait(static_cast<double>(flush_ns_), static_cast<double>(step_ns_))))
    return release();
  hold_ = Hold{.step = step, .uses = uses};
  on_change_();
}

void Commits::release() {
  hold_.reset();
  on_change_();
}

bool Commits::may_begin(const Wanted& wanted, const Progress& progress) {
  is_held_stored_ = false;
  if (!writer_.is_idle() || store_.copies()->is_committing()) return false;
  if (wanted.is_now) return saver_.is_idle();
  if (!is_stored(wanted, progress)) return false;
  is_held_stored_ = hold_ && hold_->step == wanted.end.step;
  return !is_held_stored_;
}

bool Commits::is_stored(const Wanted& wanted, const Progress& progress) const {
  const auto saved = saved_.find(wanted.end.step);
  const std::uint32_t count = saved == saved_.end() ? 0 : saved->second;
  return count == saver_.block_count() && progress.is_stored(wanted.end.step);
}

void Commits::pump(const Progress& progress) {
  saver_.pump();
  if (hold_ && (hold_->uses == 0 || progress.has_unit(hold_->uses - 1))) hold_.reset();
  if (is_stopped_) return;
  if (scheduler_.failed()) return begin_held();
  if (wanted_.empty() || !may_begin(wanted_.front(), progress)) return;
  begin_next();
}

// The engine has failed in the next step; the held commit had everything on storage before. If a
// block could not be read back, the commit might name it, and the commit before does not.
void Commits::begin_held() {
  if (!std::exchange(is_held_stored_, false) || store_.is_stuck() || store_.has_lost_state())
    return;
  is_last_ = true;
  begin_next();
}

void Commits::begin_next() {
  if (!is_device_sound()) return;
  const StepEnd end = std::move(wanted_.front().end);
  wanted_.pop_front();
  begin(end);
}

bool Commits::is_device_sound() {
  const auto fail = [this](ErrorCode code, const char* words) {
    scheduler_.fail(Error(code, fmt::format("{}; step {} cannot be committed; {}", words,
                                            wanted_.front().end.step, way_back())));
    return false;
  };
  try {
    device_.synchronize(probe_.id());
    return true;
  } catch (const Error& error) {
    return fail(error.code(), error.what());
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, error.what());
  }
}

void Commits::begin(StepEnd end) {
  saved_.erase(saved_.begin(), saved_.upper_bound(end.step));
  begun_step_ = end.step;
  store_.copies()->begin_commit();
  const auto application = std::as_bytes(std::span(end.application));
  record_.generation = next_generation_++;
  record_.step = end.step;
  record_.scale = end.scale;
  record_.application.assign(application.begin(), application.end());
  record_.planes = store_.committed_planes();
  const std::uint64_t bytes = encode_commit(record_, writer_.buffer());
  record_.planes.clear();
  const std::uint32_t slot = std::exchange(next_slot_, 1 - next_slot_);
  committing_ = std::move(end);
  writer_.begin(commit_sequence(data_file_count_), slot, bytes, committing_.step,
                [this](const std::optional<Error>& failure) { ended(failure); });
  on_change_();
}

void Commits::ended(const std::optional<Error>& failure) {
  if (failure) {
    scheduler_.fail(Error(failure->code(), fmt::format("{}; {}", failure->what(), way_back())));
  } else {
    durable_step_ = committing_.step;
    flush_ns_ = writer_.flush_ns();
    durable_application_ = std::move(committing_.application);
    if (!has_others_) store_.copies()->end_commit();
  }
  on_change_();
}

void Commits::stop() {
  if (scheduler_.failed() && !is_stopped_) begin_held();
  is_stopped_ = true;
  saver_.stop();
  if (scheduler_.failed() && !is_last_) writer_.stop();
}

std::string Commits::way_back() const {
  if (!durable_step_) return "the store has no commit yet";
  if (is_last_ && !writer_.is_idle())
    return fmt::format(
        "the store stays at step {}, or {}, whose commit is under way: open it again "
        "to continue from there",
        *durable_step_, committing_.step);
  if (writer_.has_begun_record() && committing_.step != *durable_step_)
    return fmt::format(
        "the store stays at step {}, or {}, whose commit record was being written: open it again "
        "to continue from there",
        *durable_step_, committing_.step);
  return fmt::format("the store stays at step {}: open it again to continue from there",
                     *durable_step_);
}

void Commits::set_settings(std::string settings, std::uint64_t config_hash) {
  record_.settings = std::move(settings);
  record_.config_hash = config_hash;
}

}  // namespace sluice
