// Saves and restores the state of `sluice train`, in checkpoints and in a durable store. The class
// decides from which state the run begins, and what the run saves. Each saved state also records
// the number of steps so far. The number of steps is also the run's position in the data and in the
// schedule. Each saved state also records the settings, and the length and checksum of the training
// text.
//
// Thread rule: one thread. If there are several ranks, all ranks must make the same calls.
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
#include "tools/gpt/train/run_settings.h"
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

// Returns the command line `words`, quoted for a shell. If `words` does not contain --resume, the
// function appends --resume.
std::string command_that_goes_on(std::span<char* const> words);

class Checkpointing {
 public:
  // On rank 0, the constructor locks the folder of checkpoints for this process.
  // Fails with kInput if another process has locked the folder, or if options contradict each
  // other.
  Checkpointing(const CheckpointOptions& options, const TrainConfig& config, std::uint32_t rank,
                std::uint32_t rank_count);

  bool is_on() const { return !options_.root.empty(); }
  // `products` is the name of the kernels that compute the matrix products from now on. Every saved
  // state contains this name. A run that continues with other kernels reports the change. Must be
  // called before resume().
  void set_products(std::string products) { settings_[kProducts] = std::move(products); }
  // Lines of text for the user. For example, a line may say which checkpoint was skipped, and for
  // what reason.
  const std::vector<std::string>& notes() const { return notes_; }

  // All changes of kernels since the run first began. Must be called after resume().
  const std::vector<SettingChange>& kernel_changes() const { return kernel_changes_; }
  // All accepted changes of settings and of the text, except changes of kernels. Must be called
  // after resume().
  const std::vector<SettingChange>& setting_changes() const { return setting_changes_; }

  // Returns whether the run may continue from a saved state.
  bool is_used() const { return is_on() || has_store() || !options_.resume_from.empty(); }
  bool has_store() const { return !config_.engine.storage.state.name.empty(); }

  // Gives the engine the state of the store's last commit. If the newest complete checkpoint has
  // more steps than the commit, the engine gets the state of the checkpoint instead. Returns the
  // number of steps that the run has made. The result is empty if the run begins anew.
  // Fails with kInput in these cases:
  // - A saved state exists, but the user did not ask to resume.
  // - The required state is missing or unreadable.
  // - The state of --resume-from has more steps than the run is to have.
  // - The state belongs to another model, config or text.
  std::optional<std::uint64_t> resume(Engine& engine, const InitialValues& values);
  // Returns whether resume() has begun a new run with the state of --resume-from. The steps of this
  // state are steps of another run.
  bool is_from_another_run() const { return !from_.empty(); }
  // Returns whether step_ended() saves a checkpoint after `steps` steps, and waits for the update
  // first.
  bool drains_after(std::uint64_t steps) const;
  // Returns the options for the step with the number `steps`. The steps of the run are counted from
  // 1. If there is a store, the options contain the application text for the commit.
  FinishOptions finish_options(std::uint64_t steps) const;
  // Returns the place where resume() has found the state. If resume() has found no state, the
  // result is the place where resume() has looked for a state.
  std::string origin() const;
  // Must be called when a step has ended. `steps` is the number of steps so far. Saves a checkpoint
  // if one is due. If memory.save_buffers is not 0, the checkpoint is written while the next steps
  // run. If a save fails, the call prints the failure. The run then continues, and later tries to
  // save the next checkpoint.
  void step_ended(Engine& engine, std::uint64_t steps);
  // Must be called at the end of the run. The call waits until a running save has ended. The call
  // then saves the state if the state has not been saved yet.
  // Fails with the errors of Engine::save().
  void run_ended(Engine& engine, std::uint64_t steps);
  // The number of sequences that the run has drawn when it has made `steps` steps, over all ranks,
  // with the batches of its earlier parts. Must be called after resume().
  std::uint64_t draws(std::uint64_t steps) const;
  // The checkpoints that this run has saved.
  const std::vector<SavedCheckpoint>& saved() const { return saved_; }
  // Returns a clause with the command that a user continues the run with after this process has
  // ended, and the number of ranks.
  std::string how_to_go_on() const;
  // The folder of the newest checkpoint that this run has saved, or with which this run has
  // started. The path is empty if there is no such checkpoint.
  const std::string& saved_path() const { return saved_path_; }

 private:
  struct Candidate {
    std::uint64_t step = 0;
    std::string folder;
  };
  std::optional<std::uint64_t> take_up(Engine& engine, const InitialValues& values);
  std::vector<Candidate> candidates(Engine& engine) const;
  std::optional<std::uint64_t> try_one(Engine& engine, const std::string& folder,
                                       const std::vector<Candidate>& found);
  std::optional<std::uint64_t> resume_checkpoint(Engine& engine,
                                                 const std::vector<Candidate>& found);
  std::uint64_t resume_from(Engine& engine);
  void restore(Engine& engine, StateSource& source, const std::string& folder,
               std::uint64_t steps) const;
  std::optional<std::uint64_t> resume_store(Engine& engine, const InitialValues& values,
                                            const std::vector<Candidate>& found);
  enum class Kernels : std::uint8_t { kMayChange, kStay };
  // Checks `application`, the application text of a saved state. `where` is the name that messages
  // give to the state. With kStay, a change of kernels is an error unless the user accepts the
  // change. With kMayChange, a change of kernels only adds a note.
  std::uint64_t check_application(const std::string& where, const std::string& application,
                                  Kernels kernels);
  std::string application(std::uint64_t steps) const;
  // Fails with kInput if a checkpoint of `found`, of step `step` or before, is of another run. Such
  // a checkpoint would otherwise be counted and removed as one of this run. Every rank makes the
  // call. Must be called after check_application().
  void require_own(Engine& engine, const std::vector<Candidate>& found, std::uint64_t step);
  bool is_own(const std::string& application) const;
  std::string own_beginning() const;
  SaveOptions save_options(std::uint64_t steps) const;
  void save(Engine& engine, std::uint64_t steps);
  void note(const std::optional<SavedCheckpoint>& saved, std::uint64_t steps);
  // Runs `save`. If training can go on after a failure, the failure is only printed.
  void try_to_save(Engine& engine, const std::function<void()>& save);
  void pass_over(const std::string& why);

  const CheckpointOptions options_;
  const TrainConfig& config_;
  const bool is_first_;  // whether this is rank 0
  const std::uint32_t rank_count_;
  std::map<std::string, std::string> settings_;  // the settings that affect the results
  std::string text_;                             // the data's length and checksum
  std::optional<CheckpointLock> lock_;
  std::vector<std::string> notes_;
  std::uint64_t first_steps_ = 0;  // of the state that this part of the run began with
  std::uint64_t first_draws_ = 0;
  std::vector<SettingChange> kernel_changes_;
  std::vector<SettingChange> setting_changes_;  // all other accepted changes
  std::string beginning_;  // a checksum of the settings and the text with which the run first began
  std::optional<std::uint64_t> saved_steps_;
  std::uint64_t steps_under_way_ = 0;  // the run's steps when the save under way began
  std::vector<SavedCheckpoint> saved_;
  bool is_from_store_ = false;
  std::string from_;  // the state of --resume-from, with which the run began
  std::string saved_path_;
};

}  // namespace sluice
