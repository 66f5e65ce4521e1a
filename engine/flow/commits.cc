#include "engine/flow/commits.h"

#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

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
      saver_(parts, {.may_store = [this](std::uint64_t version) { return may_store(version); },
                     .saved = [this](std::uint64_t version) { ++saved_[version]; },
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

bool Commits::may_store(std::uint64_t version) const {
  if (version == 0) return true;
  const std::uint64_t last_due = (version - 1) / commit_every_ * commit_every_;
  return last_due <= begun_step_;
}

void Commits::updated(BlockId block, std::uint64_t version) {
  if (is_due(version) && saver_.is_at_home(block)) saver_.add(block);
}

void Commits::finished(StepEnd end) {
  last_ = end;
  if (is_due(end.step)) wanted_.push_back({.end = std::move(end)});
  on_change_();
}

void Commits::want_now() {
  const bool has_begun = durable_step_.has_value() && begun_step_ == last_.step;
  if (has_begun || (!wanted_.empty() && wanted_.back().end.step == last_.step)) return;
  saver_.add_outdated();
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

bool Commits::may_begin(const Wanted& wanted,
                        const std::function<bool(std::uint64_t version)>& is_stored) const {
  if (!writer_.is_idle() || store_.copies()->is_committing()) return false;
  if (wanted.is_now) return saver_.is_idle();
  const auto saved = saved_.find(wanted.end.step);
  const std::uint32_t count = saved == saved_.end() ? 0 : saved->second;
  return count == saver_.block_count() && is_stored(wanted.end.step);
}

void Commits::pump(const std::function<bool(std::uint64_t version)>& is_stored) {
  saver_.pump();
  if (is_stopped_ || scheduler_.failed()) return;
  if (wanted_.empty() || !may_begin(wanted_.front(), is_stored)) return;
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
    durable_application_ = std::move(committing_.application);
    if (!has_others_) store_.copies()->end_commit();
  }
  on_change_();
}

void Commits::stop() {
  is_stopped_ = true;
  saver_.stop();
  if (scheduler_.failed()) writer_.stop();
}

std::string Commits::way_back() const {
  if (!durable_step_) return "the store has no commit yet";
  return fmt::format("the store stays at step {}: open it again to continue from there",
                     *durable_step_);
}

void Commits::set_settings(std::string settings, std::uint64_t config_hash) {
  record_.settings = std::move(settings);
  record_.config_hash = config_hash;
}

}  // namespace sluice
