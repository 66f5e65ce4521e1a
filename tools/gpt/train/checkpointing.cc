#include "tools/gpt/train/checkpointing.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "engine/store/store_files.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/print.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/state_origin.h"
#include "tools/gpt/train/watched_source.h"
#include "tools/report/sha256.h"

namespace sluice {
std::string command_that_goes_on(std::span<char* const> words) {
  std::string command;
  bool resumes = false;
  for (const std::string_view word : words) {
    resumes = resumes || word == "--resume" || word.starts_with("--resume=");
    command += command.empty() ? "" : " ";
    const auto is_plain = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
             std::string_view("-_=./,:@%+").find(c) != std::string_view::npos;
    };
    if (!word.empty() && std::ranges::all_of(word, is_plain)) {
      command += word;
      continue;
    }
    command += '\'';
    for (const char c : word) command += c == '\'' ? std::string("'\\''") : std::string(1, c);
    command += '\'';
  }
  return resumes ? command : command + " --resume";
}

Checkpointing::Checkpointing(const CheckpointOptions& options, const TrainConfig& config,
                             std::uint32_t rank, std::uint32_t rank_count)
    : options_(options), config_(config), is_first_(rank == 0), rank_count_(rank_count) {
  if (!is_used()) {
    if (!options.resume.empty())
      throw Error(ErrorCode::kInput,
                  "--resume needs something to go on from: a folder of checkpoints (--checkpoint), "
                  "or a durable store (storage.state.name in the config)");
    return;
  }
  settings_ = settings_of(config, rank_count);
  text_ = describe_text(config.data_file);
  say_at_interrupt(
      "sluice: interrupted before the first step; what has been made of the state stays: begin "
      "again with --resume\n");
  if (!is_first_ || !is_on()) return;
  lock_.emplace(options.root);
  notes_.insert(notes_.end(), lock_->notes().begin(), lock_->notes().end());
}

// The launcher is not known, and without it the same command would run on one rank.
std::string Checkpointing::how_to_go_on() const {
  return fmt::format("{}go on with: {}",
                     rank_count_ == 1 ? "" : fmt::format("on {} ranks, ", rank_count_),
                     options_.command);
}

void Checkpointing::pass_over(const std::string& why) {
  if (!is_first_) warn("sluice: {}\n", why);  // its notes are not printed
  notes_.push_back(fmt::format("checkpoint: skipped, since {}", why));
}

// Newest first, as rank 0 sees them.
std::vector<Checkpointing::Candidate> Checkpointing::candidates(Engine& engine) const {
  if (!is_on()) return {};
  std::string listing;
  if (is_first_) {
    for (const CheckpointName& name : list_checkpoints(options_.root))
      listing += fmt::format("{} {}\n", name.step, name.text());
  }
  std::istringstream lines(engine.share(listing));
  std::vector<Candidate> found;
  for (Candidate next; lines >> next.step >> next.folder;)
    found.push_back({.step = next.step, .folder = options_.root + "/" + next.folder});
  return found;
}

void Checkpointing::require_own(Engine& engine, const std::vector<Candidate>& found,
                                std::uint64_t step) {
  std::string foreign;
  for (const Candidate& candidate : found) {
    if (!is_first_ || candidate.step > step || !foreign.empty()) continue;
    try {
      const std::vector<std::string> texts = read_manifest(candidate.folder).application;
      if (!is_own(texts.empty() ? "" : texts[0])) foreign = candidate.folder;
    } catch (const Error&) {
      // It is damaged, or none at all.
    }
  }
  foreign = engine.share(foreign);
  if (!foreign.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is a checkpoint of another run, beside which this run would "
                            "remove what it takes for its own; name another folder for "
                            "--checkpoint, or move that checkpoint away",
                            foreign));
}

std::optional<std::uint64_t> Checkpointing::resume(Engine& engine, const InitialValues& values) {
  const std::optional<std::uint64_t> steps = take_up(engine, values);
  if (steps && *steps >= config_.steps)
    notes_.push_back(
        fmt::format("nothing to train: step {} is reached, and run.steps is {}; run.steps counts "
                    "the steps before this start, too",
                    *steps, config_.steps));
  return steps;
}

std::optional<std::uint64_t> Checkpointing::take_up(Engine& engine, const InitialValues& values) {
  beginning_ = own_beginning();
  const std::vector<Candidate> found = candidates(engine);
  if (options_.resume.empty() && !found.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has checkpoints already, the newest \"{}\"; go on from it with "
                            "--resume, or name another folder",
                            options_.root, found[0].folder));
  if (engine.committed_step()) return resume_store(engine, values, found);
  const std::optional<std::uint64_t> steps = resume_checkpoint(engine, found);
  if (steps) return steps;
  if (options_.resume == "required")
    throw Error(ErrorCode::kInput, fmt::format("--resume=required: there is no {}; check the "
                                               "folder or the name, or begin with --resume",
                                               origin()));
  if (!options_.resume_from.empty()) return resume_from(engine);
  if (has_store())
    (void)engine.open_or_create(values, {.application = application(0)});
  else
    engine.initialize(values);
  return std::nullopt;
}

std::optional<std::uint64_t> Checkpointing::resume_checkpoint(Engine& engine,
                                                              const std::vector<Candidate>& found) {
  for (const auto& [step, folder] : found) {
    if (const auto steps = try_one(engine, folder, found)) {
      saved_steps_ = steps;
      saved_path_ = folder;
      return steps;
    }
  }
  if (found.empty()) return std::nullopt;
  throw Error(ErrorCode::kDamaged,
              fmt::format("none of the {} checkpoints in \"{}\" can be used: {}; begin anew in "
                          "another folder",
                          found.size(), options_.root, fmt::join(notes_, "; ")));
}

// The store's commit is whole; a checkpoint takes its place only if it is newer.
std::optional<std::uint64_t> Checkpointing::resume_store(Engine& engine,
                                                         const InitialValues& values,
                                                         const std::vector<Candidate>& found) {
  const std::uint64_t committed = *engine.committed_step();
  const std::string& name = config_.engine.storage.state.name;
  if (options_.resume.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("the store \"{}\" holds the state of step {} already; go on from it "
                            "with --resume, choose another storage.state.name, or remove it with "
                            "`sluice state remove`",
                            name, committed));
  for (const auto& [step, folder] : found) {
    if (step <= committed) break;  // newest first
    if (const auto steps = try_one(engine, folder, found)) {
      notes_.push_back(
          fmt::format("checkpoint: step {} is newer than step {} of the store \"{}\", "
                      "and has taken its place",
                      *steps, committed, name));
      saved_steps_ = steps;
      saved_path_ = folder;
      return steps;
    }
  }
  is_from_store_ = true;
  const OpenedState opened = engine.open_or_create(values, {.accepts_changes = true});
  const std::uint64_t steps =
      check_application(fmt::format("the store \"{}\"", name), opened.application, Kernels::kStay);
  require_own(engine, found, committed);
  return steps;
}

// Begins with a state from elsewhere. A state without a text of sluice train, such as a universal
// checkpoint, goes on under this config, on this data, from as many steps as it has seen updates.
// Rank 0 opens it before the others, which share its lock of a store.
std::uint64_t Checkpointing::resume_from(Engine& engine) {
  OpenCheckpoint opened;
  std::string why;
  const auto open = [&](const std::string& job) {
    try {
      from_ = state_origin_in(options_.resume_from);
      opened = open_state_origin(
          from_, options_.converts ? CheckpointPrecision::kConvert : CheckpointPrecision::kAsSaved,
          config_, job);
    } catch (const Error& error) {
      why = fmt::format("--resume-from: {}", error.what());
    }
  };
  const std::string own_job = text_of(random_store_id());
  if (is_first_) open(own_job);
  if (const std::string job = engine.share(own_job); !is_first_) open(job);
  const std::vector<double> all = engine.exchange(opened.source ? 1 : 0);
  if (std::ranges::find(all, 0.0) != all.end())
    throw Error(ErrorCode::kInput,
                !why.empty() ? why
                             : fmt::format("--resume-from: another rank cannot read \"{}\", and "
                                           "says why",
                                           options_.resume_from));
  std::uint64_t steps = opened.source->position().step;
  if (is_weights_alone(from_))
    notes_.push_back(fmt::format(
        "checkpoint: \"{}\" is a model's weights alone: training begins at step 0, with "
        "zero moments",
        from_));
  else if (opened.application.empty())
    notes_.push_back(
        fmt::format("checkpoint: \"{}\" is of another program; its {} updates count as steps, and "
                    "settings and text are this config's",
                    from_, steps));
  else
    steps =
        check_application(fmt::format("\"{}\"", from_), opened.application[0], Kernels::kMayChange);
  if (steps > config_.steps)
    throw Error(ErrorCode::kInput,
                fmt::format("nothing to train: \"{}\" is of step {}, and run.steps is {}; choose a "
                            "larger run.steps, which counts the steps of that state, too",
                            from_, steps, config_.steps));
  restore(engine, *opened.source, from_, steps);
  return steps;
}

std::string Checkpointing::origin() const {
  if (!from_.empty()) return fmt::format("\"{}\"", from_);
  const Config::Storage& storage = config_.engine.storage;
  const std::string store =
      fmt::format("store \"{}\" in {}", storage.state.name, fmt::join(storage.paths, ", "));
  const std::string folder = fmt::format("checkpoint in \"{}\"", options_.root);
  if (is_from_store_) return fmt::format("the store \"{}\"", storage.state.name);
  if (!saved_path_.empty()) return fmt::format("\"{}\"", saved_path_);
  if (!has_store()) return folder;
  return is_on() ? fmt::format("{}, and no {}", store, folder) : store;
}

FinishOptions Checkpointing::finish_options(std::uint64_t steps) const {
  FinishOptions options;
  if (has_store()) options.application = application(steps);
  return options;
}

// Nothing where the checkpoint is not whole. All ranks get the same result. A process that may open
// no more files says nothing about the checkpoint, so no older one takes its place.
std::optional<std::uint64_t> Checkpointing::try_one(Engine& engine, const std::string& folder,
                                                    const std::vector<Candidate>& found) {
  constexpr double kOpened = 1, kPassedOver = 0, kUnable = -1;
  std::optional<CheckpointSource> source;
  std::optional<Error> obstacle;
  try {
    source.emplace(
        folder, options_.converts ? CheckpointPrecision::kConvert : CheckpointPrecision::kAsSaved);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported)
      obstacle = error;
    else
      pass_over(error.what());
  }
  const std::vector<double> opened = engine.exchange(source     ? kOpened
                                                     : obstacle ? kUnable
                                                                : kPassedOver);
  if (obstacle) throw *obstacle;
  if (std::ranges::find(opened, kUnable) != opened.end())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("another rank is unable to open \"{}\", and says why", folder));
  if (std::ranges::find(opened, kPassedOver) != opened.end()) {
    if (source) pass_over(fmt::format("another rank cannot read \"{}\", and says why", folder));
    return std::nullopt;
  }
  const std::vector<std::string>& saved = source->manifest().application;
  const std::uint64_t steps = check_application(fmt::format("\"{}\"", source->folder()),
                                                saved.empty() ? "" : saved[0], Kernels::kMayChange);
  require_own(engine, found, source->position().step);
  WatchedSource watched(*source);
  try {
    restore(engine, watched, folder, steps);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDamaged && error.code() != ErrorCode::kIo) throw;
    // Where no source has failed, it was the storage that the state goes to.
    const std::vector<double> failed = engine.exchange(watched.has_failed() ? 1 : 0);
    if (std::ranges::find(failed, 1.0) == failed.end()) throw;
    pass_over(error.what());
    return std::nullopt;
  }
  return steps;
}

// A value that is not finite is a fault of the checkpoint, not of training.
void Checkpointing::restore(Engine& engine, StateSource& source, const std::string& folder,
                            std::uint64_t steps) const {
  try {
    engine.restore(source, application(steps));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNonFinite) throw;
    throw Error(ErrorCode::kInput, fmt::format("\"{}\": {}", folder, error.what()));
  }
}

SaveOptions Checkpointing::save_options(std::uint64_t steps) const {
  SaveOptions options{.application = application(steps),
                      .keep = options_.keep,
                      .file_bytes_max = parse_size(options_.shard_size)};
  if (options_.has_sha256) options.sha256 = file_sha256;
  if (is_first_) {
    options.hyperparameters = {{"learning_rate", config_.learning_rate}};
    options.files = {{"config.json", gpt2_config_text(config_.model)}};
  }
  return options;
}

void Checkpointing::note(const std::optional<SavedCheckpoint>& saved, std::uint64_t steps) {
  if (!saved) return;
  saved_path_ = saved->path;
  saved_steps_ = steps;
  saved_.push_back(*saved);
  for (const std::string& line : saved->notes) warn("sluice: {}\n", line);
}

void Checkpointing::save(Engine& engine, std::uint64_t steps) {
  note(engine.save(options_.root, save_options(steps)), steps);
}

void Checkpointing::try_to_save(Engine& engine, const std::function<void()>& save) {
  try {
    save();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kRanks || error.code() == ErrorCode::kTimeout ||
        error.code() == ErrorCode::kPoisoned)
      throw;
    engine.drain();  // throws where the failure has stopped the engine
    warn("sluice: step {} has no checkpoint, and training goes on: {}\n", steps_under_way_,
         error.what());
  }
}

bool Checkpointing::drains_after(std::uint64_t steps) const {
  return is_on() && options_.every != 0 && steps % options_.every == 0 &&
         config_.engine.memory.save_buffers == 0;
}

// The save before ends first, so that a failure names its own step.
void Checkpointing::step_ended(Engine& engine, std::uint64_t steps) {
  if (!is_on() || options_.every == 0) return;
  const bool is_due = steps % options_.every == 0;
  try_to_save(engine,
              [&] { note(is_due ? engine.finish_save() : engine.poll_save(), steps_under_way_); });
  if (!is_due) return;
  steps_under_way_ = steps;
  try_to_save(engine, [&] {
    if (config_.engine.memory.save_buffers == 0) return save(engine, steps);
    engine.begin_save(options_.root, save_options(steps));
  });
}

void Checkpointing::run_ended(Engine& engine, std::uint64_t steps) {
  if (!is_on()) return;
  try_to_save(engine, [&] { note(engine.finish_save(), steps_under_way_); });
  if (saved_steps_ != steps) save(engine, steps);
}

}  // namespace sluice
