// The part of `sluice train` that outlives its process, in checkpoints and in a durable store:
// where the run begins, and what is saved on the way. Each also has what the trainer needs beside
// the state: the number of steps so far, which is also the position in the data and in the
// schedule, and which config and which text made it.
//
// Thread rule: one thread; of several ranks all take part.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_source.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// The matrix products of a run that went on were computed by others than before.
struct KernelChange {
  std::uint64_t steps = 0;  // that the run had made
  std::string before;
  std::string after;
};

struct CheckpointOptions {
  std::string root;         // empty: none are made
  std::uint64_t every = 0;  // steps; 0 = only at the end
  std::uint32_t keep = 0;   // 0 = all
  std::string resume;       // empty, "newest" or "required"
  bool converts = false;
  bool accepts_config = false;
  bool accepts_data = false;
  bool accepts_kernels = false;
  std::string command;  // that goes on
};

// The same command with --resume, as a shell takes it.
std::string command_that_goes_on(std::span<char* const> words);

// config.json of a checkpoint's folder, for programs that know GPT-2 by it: transformers reads the
// folder as it is.
std::string gpt2_config_text(const gpt::GptConfig& model);

class Checkpointing {
 public:
  // On rank 0, takes the folder for this process.
  // Fails with: kInput where another has it, or options do not fit together.
  Checkpointing(const CheckpointOptions& options, const TrainConfig& config, std::uint32_t rank,
                std::uint32_t rank_count);

  bool is_on() const { return !options_.root.empty(); }
  // The kernels that compute the matrix products from now on. They are kept with the state, and a
  // run that goes on with others says so. To be called before resume().
  void set_products(std::string products) { settings_[kProducts] = std::move(products); }
  // Lines for the user: which checkpoints were skipped, and why.
  const std::vector<std::string>& notes() const { return notes_; }

  // All changes of that kind since the run began. After resume().
  const std::vector<KernelChange>& kernel_changes() const { return kernel_changes_; }

  bool has_store() const { return !config_.engine.storage.state.name.empty(); }

  // Gives the engine the state of the store's last commit, or of the newest checkpoint that is
  // whole, whichever has more steps. Returns the steps that the run has been through; nothing where
  // it begins anew.
  // Fails with: kInput where there is one and it was not asked for, none although it was, none that
  // can be read, or it is of another model, config or text.
  std::optional<std::uint64_t> resume(Engine& engine, const InitialValues& values);
  // The text that the store's commit of the state after so many steps keeps.
  FinishOptions finish_options(std::uint64_t steps) const;
  // The place where resume() has found the state, or looked for it.
  std::string origin() const;
  // So many steps are done. Saves when it is time; a failed save is printed, and tried again later.
  void step_ended(Engine& engine, std::uint64_t steps);
  // The run ends. Saves what is not saved yet.
  // Fails with: as Engine::save().
  void run_ended(Engine& engine, std::uint64_t steps);
  // The command that goes on where this run ends.
  const std::string& command() const { return options_.command; }
  // The step of the newest one that this run has saved or begun from; nothing where there is none.
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
  std::optional<std::uint64_t> resume_store(Engine& engine, const InitialValues& values,
                                            const std::vector<Candidate>& found);
  // `where`: the state whose `application` it is.
  // Other kernels than before are an error for a store, and a note for a checkpoint.
  enum class Kernels : std::uint8_t { kMayChange, kStay };
  std::uint64_t check_application(const std::string& where, const std::string& application,
                                  Kernels kernels);
  std::string application(std::uint64_t steps) const;
  void save(Engine& engine, std::uint64_t steps);
  void pass_over(const std::string& why);

  static constexpr const char* kProducts = "matrix products";

  const CheckpointOptions options_;
  const TrainConfig& config_;
  const bool is_first_;                          // rank
  std::map<std::string, std::string> settings_;  // which decide the run's numbers
  std::string text_;                             // the data's length and checksum
  std::optional<CheckpointLock> lock_;
  std::vector<std::string> notes_;
  std::vector<KernelChange> kernel_changes_;
  std::optional<std::uint64_t> saved_steps_;
  bool is_from_store_ = false;
  std::string saved_path_;
};

}  // namespace sluice
