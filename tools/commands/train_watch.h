// Some parts of `sluice train` run between steps: validation, samples, and the event file for
// TensorBoard. These parts do not change a single bit of the training's result.
//
// Thread rule: one thread. If there are several ranks, all ranks must make the same calls.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/output_file.h"
#include "tools/gpt/text/tokenizer.h"
#include "tools/gpt/train/dataset.h"
#include "tools/gpt/train/run_publisher.h"
#include "tools/gpt/train/trainer.h"
#include "tools/report/step_log.h"

namespace sluice {

struct WatchOptions {
  std::uint64_t validate_every = 0;  // steps; 0 = only at the end
  std::uint64_t sample_every = 0;    // steps; 0 = never
  std::string sample_prompt = "\n";
  std::uint64_t sample_tokens = 100;
  double sample_temperature = 0.8;
  std::string tensorboard_folder;  // empty = no event file
};

// The training run that TrainWatch watches. All objects to which the struct refers must outlive the
// TrainWatch.
struct WatchedRun {
  const TrainConfig& config;
  const Dataset& dataset;
  Trainer& trainer;
  RunPublisher& publisher;
  bool is_quiet;
  StopRequest stop;  // ends validations
};

class TrainWatch {
 public:
  // `events` is the event file of rank 0. begin() writes the first record to the event file.
  // `events` and `options` must outlive the watch.
  // Fails with:
  // - kInput: a prompt has no tokens.
  // - kUnsupported: samples are wanted from a run that computes on a GPU.
  // - kConfig: samples are wanted without a tokenizer, and the model does not have exactly 256
  //   tokens.
  TrainWatch(const WatchOptions& options, const WatchedRun& run, OutputFile& events);

  // Writes the event file's first record.
  // Fails with the errors of OutputFile.
  void begin();
  void accept() noexcept { events_.accept(); }

  // Returns whether step_ended() or tell() evaluates the model after `step` steps. An evaluation
  // waits for the update, which is still a part of the step's time.
  bool evaluates_after(std::uint64_t step) const;

  // Must be called after each step, before the record of the step is written. Computes the
  // validation loss if a validation is due.
  void step_ended(StepRecord& record);
  // Must be called after the step has been printed. Prints the validation loss. If a sample is due,
  // the call also draws and prints a sample. Writes the step's events if `is_logged` is true, and
  // also if there is a validation loss or a sample.
  void tell(const StepRecord& record, bool is_logged);

  // Returns the mean cross-entropy on the validation part of the data after `steps` steps. Returns
  // nothing if the run has been asked to stop.
  std::optional<double> validation_loss(std::uint64_t steps);
  const std::vector<TokenBatch>& validation_batches();

  // Adds the last step and the last validation loss of the run to the event file.
  // Fails with the first error that occurred when the event file was written.
  void finish(std::uint64_t steps, std::optional<double> validation_loss);

 private:
  std::string sample(std::uint64_t step);
  void append_events(const std::string& record);

  const WatchOptions& options_;
  const TrainConfig& config_;
  const Dataset& dataset_;
  Trainer& trainer_;
  RunPublisher& publisher_;
  OutputFile& events_;
  const bool is_quiet_;
  const StopRequest stop_;
  std::optional<Tokenizer> tokenizer_;
  std::vector<std::uint32_t> prompt_;
  std::vector<TokenBatch> batches_;
  std::uint64_t validated_steps_ = 0;
  std::optional<double> validation_loss_;  // the loss after `validated_steps_` steps
  std::string pending_event_;              // of the last step, if it was not logged
  std::exception_ptr events_failure_;
};

}  // namespace sluice
