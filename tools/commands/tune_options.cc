#include "tools/commands/tune_options.h"

#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"
#include "tools/commands/config_options.h"

namespace sluice {

void add_tune(CLI::App& app, TuneOptions& options) {
  CLI::App* tune = app.add_subcommand(
      "tune", "Find quicker settings for a config on this machine, by a model and short runs");
  add_input(tune, "CONFIG", options.config_file, "Config file, as for train")->required();
  tune->add_option("--set", options.assignments, "Override any key (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  add_input(tune, "--data", options.data_file, "Text or token file; overrides data.file");
  CLI::Option* output =
      add_output(tune, "-o,--output", options.output, "The tuned config, with all keys of CONFIG");
  add_output(tune, "--json", options.json_file, "Write predictions, measurements and settings");
  tune->add_option("--keep", options.kept,
                   "Key or section that stays as it is, such as memory (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY");
  tune->add_option("--finalists", options.finalists, "Candidates that run, beside CONFIG")
      ->check(CLI::Range(1, 20))
      ->capture_default_str();
  CLI::Option* const steps =
      tune->add_option("--steps", options.steps,
                       "Measured steps of each run; 0 = as many as --seconds allow")
          ->check(CLI::Range(0, 1000))
          ->capture_default_str();
  CLI::Option* const seconds =
      tune->add_option("--seconds", options.seconds, "Time for all runs together, about")
          ->check(between(1, 1e6))
          ->capture_default_str();
  CLI::Option* const dry_run =
      tune->add_flag("--dry-run", options.dry_run, "Only predict: run nothing")
          ->excludes(output)
          ->excludes(steps)
          ->excludes(seconds);
  tune->add_option("--flops", options.flops,
                   "With --dry-run: operations per second that computation reaches")
      ->check(between(1, 1e24))
      ->needs(dry_run);
  add_input(tune, "--gpu-rates", options.gpu_file,
            "Figures written by bench gpu --json, for what runs do not measure");
  tune->add_flag("--recalibrate", options.recalibrate,
                 "Measure drives and Adam again, even if a calibration is at hand");
  tune->add_option("--calibration-days", options.calibration_days,
                   "Measure again after so many days")
      ->check(between(0, 1e5))
      ->capture_default_str();
  add_deepspeed_values(tune, options.deepspeed);
}

}  // namespace sluice
