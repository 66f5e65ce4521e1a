#include "tools/commands/config_options.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"

namespace sluice {
namespace {

constexpr const char* kGroup = "Values for \"auto\" in a DeepSpeed file";
constexpr std::uint64_t kCountMax = 1'000'000'000;

void add_steps(CLI::App* command, DeepspeedValues& values) {
  command->add_option("--steps", values.steps, "All steps of the training")
      ->check(CLI::Range(std::uint64_t{1}, kCountMax))
      ->group(kGroup);
  values.steps_option = "--steps";
  command->add_option("--ranks", values.ranks, "Ranks that train; default: as the launcher says")
      ->check(CLI::Range(1, 65536))
      ->group(kGroup);
}

CLI::App* add_view(CLI::App* config, const char* name, const char* text,
                   ConfigShowOptions& options) {
  CLI::App* command = config->add_subcommand(name, text);
  add_input(command, "CONFIG", options.file, "Config file, of Sluice or of DeepSpeed")->required();
  command
      ->add_option("--set", options.assignments,
                   "Override any key: --set memory.host=10MiB (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  add_deepspeed_values(command, options.values);
  return command;
}

}  // namespace

void add_deepspeed_values(CLI::App* command, DeepspeedValues& values) {
  const auto count = [&](const char* name, std::optional<std::uint64_t>& value, const char* text,
                         std::uint64_t least) {
    command->add_option(name, value, text)->check(CLI::Range(least, kCountMax))->group(kGroup);
  };
  const auto number = [&](const char* name, std::optional<double>& value, const char* text) {
    command->add_option(name, value, text)->check(between(0, 1e30))->group(kGroup);
  };
  values.steps_option = "--set run.steps=N";
  count("--batch", values.batch, "Sequences of a micro-batch", 1);
  count("--micro-batches", values.micro_batches, "Micro-batches of a step", 1);
  number("--lr", values.learning_rate, "Learning rate");
  command
      ->add_option("--betas", values.betas, "The two betas, such as --betas 0.9 0.999 or 0.9,0.999")
      ->delimiter(',')
      ->expected(2)
      ->check([](const std::string& text) -> std::string {
        double beta = 0;
        const auto read = std::from_chars(text.data(), text.data() + text.size(), beta);
        const bool is_beta = read.ec == std::errc{} && read.ptr == text.data() + text.size() &&
                             beta >= 0 && beta < 1;
        return is_beta ? "" : fmt::format("{} is no number from 0 to below 1", text);
      })
      ->group(kGroup);
  number("--eps", values.epsilon, "Epsilon of the optimizer");
  number("--weight-decay", values.weight_decay, "Weight decay");
  number("--clip-norm", values.clip_norm, "Bound on the gradient's norm");
  count("--warmup-steps", values.warmup_steps, "Steps of the warm-up", 0);
  command
      ->add_option("--precision", values.precision,
                   "bf16, fp16 or fp32; default: bf16 where the file says \"auto\"")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->group(kGroup);
}

void add_config(CLI::App& app, ConfigCommands& commands) {
  CLI::App* config = app.add_subcommand("config", "Import a DeepSpeed file; look at configs");
  config->require_subcommand(1);
  ConfigImportOptions& options = commands.imported;
  CLI::App* import = config->add_subcommand(
      "import", "Turn a DeepSpeed file into a config, and say for every key what became of it");
  add_input(import, "FILE", options.file, "DeepSpeed file (JSON, Hjson), or its text in base64")
      ->required();
  add_output(import, "-o,--output", options.output,
             "The config; default: on standard output, the report on standard error");
  import->add_flag("--json", options.as_json, "Print the report as JSON on standard output");
  import->add_flag("--lenient", options.is_lenient, "Leave out keys that are refused, and go on");
  add_deepspeed_values(import, options.values);
  add_steps(import, options.values);
  import->add_option("--device", options.values.device, "As run.device")
      ->check(CLI::IsMember({"auto", "cuda", "host"}))
      ->group(kGroup);
  add_steps(add_view(config, "check", "Say whether train would take a config, and what is wrong",
                     commands.check),
            commands.check.values);
  CLI::App* show = add_view(config, "show", "Print every key with its value and the value's origin",
                            commands.show);
  add_steps(show, commands.show.values);
  show->add_flag("--json", commands.show.as_json, "Print JSON");
  CLI::App* rates =
      add_view(config, "rates", "Print the learning rate of every step", commands.rates);
  rates->add_option("--steps", commands.rates.steps, "Number of steps; 0 = run.steps")
      ->check(CLI::Range(std::uint64_t{0}, kCountMax))
      ->capture_default_str();
  CLI::App* diff =
      config->add_subcommand("diff", "Print the keys whose values differ, defaults included");
  add_input(diff, "A", commands.diff.before, "One config")->required();
  add_input(diff, "B", commands.diff.after, "The other")->required();
  add_deepspeed_values(diff, commands.diff.values);
  add_steps(diff, commands.diff.values);
  config->add_subcommand("explain", "Describe a key of Sluice or of DeepSpeed")
      ->add_option("KEY", commands.key, "Such as optimizer.beta2, or zero_optimization.stage")
      ->required();
}

}  // namespace sluice
