// The part of `sluice train` that outlives its process, in checkpoints and in a durable store. This
// part decides where the run begins, and what is saved during the run. Each saved state also
// records the number of steps so far. This number is also the position in the data and in the
// schedule. The record includes the config and the text that made the state.
//
// Thread rule: one thread. With several ranks, all ranks take part.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/engine.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_source.h"
#include "tools/gpt/train/setting_changes.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct CheckpointOptions {
  std::string root;         // empty: no checkpoints are made
  std::uint64_t every = 0;  // steps between checkpoints; 0 = only at the end
  std::uint32_t keep = 0;   // 0 = all
  std::string shard_size = "5GB";
  bool has_sha256 = false;  // the manifest has SHA-256 digests, too
  std::string resume;       // empty, "newest" or "required"
  std::string resume_from;  // the checkpoint with which a new run begins; empty: none
  bool converts = false;
  bool accepts_config = false;
  bool accepts_data = false;
  bool accepts_kernels = false;
  std::string command;  // the command that resumes the run
};

// The same command with --resume, quoted for a shell.
std::string command_that_goes_on(std::span<char* const> words);

// A text for a state that has no text, so that a run with `config` can continue from the state.
// Fails with kInput if the config's data cannot be opened.
std::string application_for(const TrainConfig& config, std::uint32_t ranks, std::uint64_t steps);

class Checkpointing {
 public:
  // Rank 0 locks the checkpoints' folder for this process.
  // Fails with kInput if another process has locked the folder, or if options do not fit together.
  Checkpointing(const CheckpointOptions& options, const TrainConfig& config, std::uint32_t rank,
                std::uint32_t rank_count);

  bool is_on() const { return !options_.root.empty(); }
  // Names the kernels that compute the matrix products from now on. The name is kept with the
  // state, and a run that continues with other kernels reports the change. Must be called before
  // resume().
  void set_products(std::string products) { settings_[kProducts] = std::move(products); }
  // Lines of text for the user. The lines say which checkpoints were skipped, and why.
  const std::vector<std::string>& notes() const { return notes_; }

  // All changes of kernels since the run began. Must be called after resume().
  const std::vector<SettingChange>& kernel_changes() const { return kernel_changes_; }
  // All other accepted changes, of settings and of the text. Must be called after resume().
  const std::vector<SettingChange>& setting_changes() const { return setting_changes_; }

  // Whether the run may continue from a saved state.
  bool is_used() const { return is_on() || has_store() || !options_.resume_from.empty(); }
  bool has_store() const { return !config_.engine.storage.state.name.empty(); }

  // Gives the engine the state of the store's last commit or of the newest complete checkpoint. The
  // state with more steps is taken. Returns the number of steps that the run has made. The result
  // is empty if the run begins anew.
  // Fails with kInput in these cases:
  // - A state exists, but no resume was asked for.
  // - The required state is missing or unreadable.
  // - The state is of another model, config or text.
  std::optional<std::uint64_t> resume(Engine& engine, const InitialValues& values);
  // The options for step number `steps` of the run, counted from 1. With a store, the options have
  // the text that the commit keeps.
  FinishOptions finish_options(std::uint64_t steps) const;
  // The place where resume() has found the state. If resume() has found no state, the place where
  // resume() has looked for it.
  std::string origin() const;
  // Must be called when `steps` steps are done. Saves a checkpoint if one is due. If
  // memory.save_buffers is not 0, the save runs beside the next steps. A failed save is printed,
  // and the next checkpoint tries again.
  void step_ended(Engine& engine, std::uint64_t steps);
  // Must be called at the end of the run. Waits for a save under way, and then saves the state,
  // unless this state has been saved already.
  // Fails with the errors of Engine::save().
  void run_ended(Engine& engine, std::uint64_t steps);
  // The checkpoints that this run has saved.
  const std::vector<SavedCheckpoint>& saved() const { return saved_; }
  // The command with which a user resumes the run where this process ends.
  const std::string& command() const { return options_.command; }
  // The folder of the newest checkpoint that this run has saved or has started from. The path is
  // empty if there is no such checkpoint.
  const std::string& saved_path() const { return saved_path_; }

 private:
  struct Candidate {
    std::uint64_t step = 0;
    std::string folder;
  };
  std::vector<Candidate> candidates(Engine& engine) const;
  std::optional<std::uint64_t> try_one(Engine& engine, const std::string& folder);
  std::optional<std::uint64_t> resume_checkpoint(Engine& engine,
                                                 const std::vector<Candidate>& found);
  std::uint64_t resume_from(Engine& engine);
  void restore(Engine& engine, StateSource& source, const std::string& folder,
               std::uint64_t steps) const;
  std::optional<std::uint64_t> resume_store(Engine& engine, const InitialValues& values,
                                            const std::vector<Candidate>& found);
  enum class Kernels : std::uint8_t { kMayChange, kStay };
  // Checks `application`, the text of a saved state. `where` names this state in messages.
  // A change of kernels is an error for a store, and a note for a checkpoint.
  std::uint64_t check_application(const std::string& where, const std::string& application,
                                  Kernels kernels);
  std::string application(std::uint64_t steps) const;
  SaveOptions save_options(std::uint64_t steps) const;
  void save(Engine& engine, std::uint64_t steps);
  void note(const std::optional<SavedCheckpoint>& saved, std::uint64_t steps);
  // Runs `save`. A failure that training survives is only printed.
  void try_to_save(Engine& engine, const std::function<void()>& save);
  void pass_over(const std::string& why);

  static constexpr const char* kProducts = "matrix products";

  const CheckpointOptions options_;
  const TrainConfig& config_;
  const bool is_first_;                          // rank
  std::map<std::string, std::string> settings_;  // the settings that decide the run's numbers
  std::string text_;                             // the data's length and checksum
  std::optional<CheckpointLock> lock_;
  std::vector<std::string> notes_;
  std::vector<SettingChange> kernel_changes_;
  std::vector<SettingChange> setting_changes_;  // all others that were accepted
  std::optional<std::uint64_t> saved_steps_;
  std::uint64_t steps_under_way_ = 0;  // of the run when the save under way began
  std::vector<SavedCheckpoint> saved_;
  bool is_from_store_ = false;
  std::string from_;  // the checkpoint of --resume-from that the run began with
  std::string saved_path_;
};

}  // namespace sluice
