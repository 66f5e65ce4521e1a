// The part of the facade that writes checkpoints.
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include "base/trace/trace_clock.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/engine_parts.h"

namespace sluice {
namespace {

// A program that never asks gets no more of them than this.
constexpr std::size_t kNotesMax = 100;

// `later` takes over what no call has returned of `earlier`.
void take_over(SavedCheckpoint&& earlier, SavedCheckpoint& later) {
  std::vector<std::string> notes = std::move(earlier.notes);
  notes.push_back(
      fmt::format("checkpoint: \"{}\" of step {} had appeared before \"{}\"; no call had asked "
                  "for it by then",
                  earlier.path, earlier.step, later.path));
  std::ranges::move(later.notes, std::back_inserter(notes));
  if (notes.size() > kNotesMax)
    notes.erase(notes.begin(), notes.end() - static_cast<std::ptrdiff_t>(kNotesMax));
  later.notes = std::move(notes);
}

}  // namespace

SavedCheckpoint Engine::save(const std::string& root, const SaveOptions& options) {
  const CallGuard guard(parts_->link, "save");
  parts_->require_idle("save");
  parts_->advance_save(SaveWait::kYes);
  parts_->throw_save_failure();
  const std::uint64_t begin_ns = trace_now_ns();
  parts_->loop.lend_buffers();
  CheckpointWriter writer(parts_->layout, parts_->description_of_all(), parts_->state.place_count(),
                          parts_->ranks);
  try {
    SavedCheckpoint saved =
        writer.save(root, parts_->loop.position(), parts_->save_options(options),
                    [this](const StateAccess::Visit& visit) { parts_->state.visit_blocks(visit); });
    parts_->loop.return_buffers();
    saved.blocked_ns = saved.duration_ns = static_cast<std::int64_t>(trace_now_ns() - begin_ns);
    return saved;
  } catch (...) {
    parts_->loop.return_buffers();
    throw;
  }
}

void Engine::begin_save(const std::string& root, const SaveOptions& options) {
  const CallGuard guard(parts_->link, "begin_save");
  parts_->require_idle("begin_save");
  const std::uint32_t buffers = parts_->placement.save_buffers.count;
  if (buffers == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "begin_save: memory.save_buffers is 0; a checkpoint beside training needs at least "
                "1 buffer, or call save(), which waits");
  const std::uint64_t begin_ns = trace_now_ns();
  parts_->advance_save(SaveWait::kYes);
  parts_->throw_save_failure();
  Parts::Save save{.writer = std::make_unique<CheckpointWriter>(
                       parts_->layout, parts_->description_of_all(), buffers, parts_->ranks),
                   .step = parts_->loop.scheduled_step(),
                   .begin_ns = begin_ns};
  CheckpointWriter& writer = *save.writer;
  // First what may fail on one rank alone.
  parts_->ranks.together("a checkpoint", [this] { parts_->loop.prepare_save(); });
  writer.begin(root, parts_->loop.position(), parts_->save_options(options));
  parts_->loop.begin_save(
      {.write = [&writer](const BlockView& view, std::uint32_t place,
                          std::span<std::byte> room) { writer.write(view, place, room); },
       .finish = [&writer] { writer.sync(); }},
      writer.writes_blocks());
  save.blocked_ns = static_cast<std::int64_t>(trace_now_ns() - begin_ns);
  parts_->save = std::move(save);
}

std::optional<SavedCheckpoint> Engine::poll_save() {
  const CallGuard guard(parts_->link, "poll_save");
  parts_->throw_save_failure();
  return std::exchange(parts_->saved, std::nullopt);
}

std::optional<SavedCheckpoint> Engine::finish_save() {
  const CallGuard guard(parts_->link, "finish_save");
  parts_->require_idle("finish_save");
  parts_->advance_save(SaveWait::kYes);
  parts_->throw_save_failure();
  return std::exchange(parts_->saved, std::nullopt);
}

std::optional<SaveProgress> Engine::save_progress() const {
  const CallGuard guard(parts_->link, "save_progress");
  const auto count = parts_->loop.save_count();
  if (!parts_->save || !count) return std::nullopt;
  return SaveProgress{.step = parts_->save->step,
                      .block_count = count->block_count,
                      .saved_blocks = count->saved_blocks};
}

SaveOptions Engine::Parts::save_options(SaveOptions options) const {
  options.hyperparameters.merge(hyperparameters_of(config.optimizer));
  return options;
}

// All ranks decide alike, because all of them have to have ended.
void Engine::Parts::advance_save(SaveWait wait) {
  if (!save) return;
  const std::uint64_t begin_ns = trace_now_ns();
  if (wait == SaveWait::kYes)  // ranks without blocks of their own are over at once
    ranks.together_for_long("a checkpoint", [this] { loop.await_save(); });
  RankRange over(loop.save_count()->is_over ? 1 : 0);
  ranks.all_reduce({}, std::span(&over, 1), "a checkpoint");
  if (over.least == 0) {
    save->blocked_ns += static_cast<std::int64_t>(trace_now_ns() - begin_ns);
    return;
  }
  const StateSaver::End end = loop.end_save();
  const Save ended = std::move(*save);
  save.reset();
  try {
    SavedCheckpoint named = ended.writer->finish(end.failure);
    const std::uint64_t now_ns = trace_now_ns();
    named.duration_ns = static_cast<std::int64_t>(now_ns - ended.begin_ns);
    named.blocked_ns = ended.blocked_ns + static_cast<std::int64_t>(now_ns - begin_ns);
    named.update_wait_ns = end.update_wait_ns;
    if (saved) take_over(std::move(*saved), named);
    saved = std::move(named);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kRanks) throw;
    save_failure = error;
  }
}

void Engine::Parts::throw_save_failure() {
  if (const std::optional<Error> failure = std::exchange(save_failure, std::nullopt))
    throw *failure;
}

}  // namespace sluice
