#include "tools/commands/train_options.h"

#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"
#include "tools/commands/config_options.h"

namespace sluice {
namespace {

void add_checkpoints(CLI::App& train, CheckpointOptions& options) {
  CLI::Option* const root =
      train.add_option("--checkpoint", options.root,
                       "Folder for checkpoints: all of the state, for --resume and other programs");
  train
      .add_option("--checkpoint-every", options.every,
                  "Steps from one checkpoint to the next; 0 = only at the end or a signal")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 40))
      ->needs(root)
      ->capture_default_str();
  train.add_option("--keep", options.keep, "Number of newest checkpoints to keep; 0 = all")
      ->check(CLI::Range(0, 1'000'000'000))
      ->needs(root)
      ->capture_default_str();
  train
      .add_option("--shard-size", options.shard_size,
                  "Largest size of a checkpoint's file, like 5GB")
      ->check(is_size())
      ->needs(root)
      ->capture_default_str();
  train
      .add_flag("--sha256", options.has_sha256,
                "Checkpoints' manifests have the SHA-256 of every file and tensor, too")
      ->needs(root);
  train
      .add_flag("--resume{newest}", options.resume,
                "Go on from the durable store (storage.state.name) or the newest whole checkpoint, "
                "whichever has more steps, or begin anew where there is neither; "
                "--resume=required: fail there")
      ->check(CLI::IsMember({"newest", "required"}));
  train
      .add_option("--resume-from", options.resume_from,
                  "Begin a new run with the state of this checkpoint: a folder of sluice train, a "
                  "universal checkpoint of DeepSpeed, a model's weights (.safetensors), or "
                  "store:NAME, a durable store on storage.paths")
      ->excludes(train.get_option("--init"));
  train.add_flag("--convert", options.converts,
                 "Accept a checkpoint with another precision or other frozen units");
  train.add_flag("--accept-config", options.accepts_config,
                 "Accept settings that differ from those of the checkpoint or store");
  train.add_flag("--accept-data", options.accepts_data,
                 "Accept a text that differs from that of the checkpoint or store");
  train.add_flag("--accept-kernels", options.accepts_kernels,
                 "Go on with a store whose matrix products were computed by another library, "
                 "version or kernel family; the report names the step");
}

void add_watch(CLI::App& train, TrainOptions& options) {
  const auto add_steps = [&](const char* name, std::uint64_t& steps, const char* text) {
    train.add_option(name, steps, text)
        ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 40))
        ->capture_default_str();
  };
  WatchOptions& watch = options.watch;
  add_steps("--validate-every", watch.validate_every,
            "Steps from one validation to the next; 0 = only at the end");
  add_steps("--sample-every", watch.sample_every,
            "Steps from one sample of the model's text to the next; 0 = none");
  train
      .add_option("--sample-prompt", watch.sample_prompt,
                  "Text that samples go on from; default: a line end")
      ->needs("--sample-every");
  train.add_option("--sample-tokens", watch.sample_tokens, "Tokens of a sample")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}))
      ->needs("--sample-every")
      ->capture_default_str();
  train.add_option("--tensorboard", watch.tensorboard_folder,
                   "Folder for an event file that TensorBoard reads");
  CLI::Option* const peak =
      train
          .add_option("--peak-flops", options.peak_flops,
                      "Peak operations per second of one rank, like 165T; steps then have MFU")
          ->check(between(1, 1e18));
  train
      .add_flag("--measure-peak", options.measures_peak,
                "Measure that peak with the run's matrix products before the first step")
      ->excludes(peak);
  train
      .add_option("--compare-memory", options.compare_memory,
                  "Steps of the same training with all state in memory, measured before the run, "
                  "as a yardstick for its steps")
      ->check(CLI::Range(std::uint64_t{2}, std::uint64_t{1} << 20));
}

}  // namespace

void add_train(CLI::App& app, TrainOptions& options) {
  CLI::App* train = app.add_subcommand(
      "train", "Train a GPT on a text, with its state in device memory, host memory and on NVMe");
  add_input(train, "CONFIG", options.config_file,
            "Config file (docs/configuration.md), or a DeepSpeed file")
      ->required();
  add_input(train, "--data", options.data_file, "Text or token file; overrides data.file");
  add_input(train, "--tokenizer", options.tokenizer,
            "Tokenizer (tokenizer.json, vocab.json or a folder); overrides data.tokenizer");
  train->add_option("--steps", options.steps, "Overrides run.steps");
  train->add_option("--seed", options.seed, "Overrides run.seed");
  train
      ->add_option("--set", options.assignments,
                   "Override any key: --set memory.host=10MiB (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  add_input(train, "--init", options.init_file,
            "Start from the weights of a saved model (safetensors)");
  add_output(train, "--save", options.save_file,
             "Save the fp32 master weights at the end (safetensors)");
  add_output(train, "--json", options.json_file,
             "Write every step's figures and the state's SHA-256 at the end");
  add_output(train, "--json-lines", options.json_lines_file,
             "Write a line of JSON for each step as it ends");
  add_output(train, "--csv", options.csv_file, "Write one row of figures for each step as it ends");
  train
      ->add_option("--log-every", options.log_every,
                   "Print and write only every N-th step, and the last one")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
      ->capture_default_str();
  add_output(train, "--trace", options.trace_file,
             "Record every transfer, copy, update and wait (sluice trace reads it)");
  add_watch(*train, options);
  add_checkpoints(*train, options.checkpoints);
  add_deepspeed_values(train, options.deepspeed);
  options.deepspeed.steps_option = "--steps";
  train->add_flag("--quiet", options.quiet, "Print nothing but errors");
}

}  // namespace sluice
