#include "tools/commands/plan_options.h"

#include "tools/cli/option_checks.h"
#include "tools/cli/option_files.h"
#include "tools/commands/config_options.h"
#include "tools/report/machine_presets.h"

namespace sluice {
namespace {

constexpr std::uint64_t kSequenceMax = 1'000'000'000;

void add_model_and_machine(CLI::App* plan, PlanOptions& options) {
  CLI::Option* model =
      add_input(
          plan, "--model", options.model,
          "Plan for a model known by name, of a config.json, of safetensors files, or of a folder "
          "with them")
          ->type_name("PATH")
          ->excludes("--parameters");
  add_output(plan, "--tensors", options.tensors_file,
             "Write the model's units, tensors and shapes");
  plan->add_option(
          "--sequence", options.sequence,
          "With --model: tokens of a sequence; default: 2048, or less if the model allows less")
      ->check(CLI::Range(std::uint64_t{1}, kSequenceMax))
      ->needs(model);
  plan->add_option_function<std::string>(
          "--as", [&options](const std::string&) { options.as_deepspeed = true; },
          "Also print the memory that DeepSpeed's estimators state: --as deepspeed")
      ->check(CLI::IsMember({"deepspeed"}))
      ->type_name("NAME");
  plan->add_option("--nodes", options.nodes,
                   "Hosts that the ranks are on; memory, drives and rates are then a host's")
      ->check(CLI::Range(1, 1 << 20));
  plan->add_option("--gpu", options.gpu, "Plan for this GPU: " + gpu_names())->type_name("NAME");
  plan->add_option(
          "--host-memory", options.host_memory,
          "Host memory for the engine in place of memory.host, such as 56G: what the program and "
          "the system leave")
      ->check(is_size())
      ->type_name("SIZE");
  plan->add_option("--drive", options.drive,
                   "Rates, space and life of such drives, or of several: 990pro:4. Known are " +
                       drive_names())
      ->type_name("NAME[:COUNT]");
  plan->add_option("--drive-space", options.drive_space, "Space on all drives, such as 8TB")
      ->check(is_size())
      ->type_name("SIZE");
}

void add_rates(CLI::App* plan, PlanOptions& options) {
  PlanRateOptions& rates = options.rates;
  add_input(plan, "--io", rates.io_file, "Calibration written by bench io --json");
  add_input(plan, "--adam", rates.adam_file, "Figures written by bench adam --json");
  add_input(plan, "--gpu-rates", rates.gpu_file, "Figures written by bench gpu --json");
  const auto add_size = [plan](const char* name, std::string& size, const char* text) {
    plan->add_option(name, size, text)
        ->transform(rate_suffix())
        ->check(is_size())
        ->type_name("SIZE");
  };
  const auto add_rate = [plan](const char* name, std::optional<double>& rate, const char* text) {
    plan->add_option(name, rate, text)->check(between(1, 1e24));
  };
  add_size("--read-rate", rates.read, "Storage reads, bytes per second (such as 6GB)");
  add_size("--write-rate", rates.write, "Storage writes");
  plan->add_option("--duplex", rates.duplex,
                   "full: storage reads and writes at once; half: one after the other")
      ->check(CLI::IsMember({"full", "half"}));
  add_size("--link-rate", rates.link, "A rank's link to the other ranks, each way");
  add_size("--copy-rate", rates.copy, "Copies to and from the device, each way");
  add_size("--host-memory-rate", rates.host_memory, "Host memory, reading plus writing");
  add_rate("--adam-rate", rates.adam, "Parameters that Adam updates per second (such as 2e9)");
  add_rate("--device-adam-rate", rates.device_adam,
           "Parameters per second that the device updates, for state at home there");
  plan->add_option("--flush-ms", rates.flush_ms,
                   "Milliseconds for which each flush of a commit occupies the drives")
      ->check(between(0, 60000));
  add_rate("--flops", rates.flops, "Operations per second that computation reaches");
  add_size("--bytes-written-rating", options.bytes_written_rating,
           "Bytes that may be written to the drives in their life (such as 1200TB)");
}

}  // namespace

void add_plan(CLI::App& app, PlanOptions& options) {
  CLI::App* plan = app.add_subcommand(
      "plan",
      "Say what a run will need and cost before it starts, and compare places for the state");
  add_input(plan, "CONFIG", options.config_file, "Config file, as for train; default: none");
  plan->add_option("--set", options.assignments, "Override any key (may be repeated)")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  add_deepspeed_values(plan, options.deepspeed);
  plan->add_option("--ranks", options.ranks, "Ranks that share the state")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  plan->add_flag("--stages", options.stages, "Also print what each ZeRO stage leaves on one rank");
  plan->add_flag("--matrix", options.matrix,
                 "Also print memory and time of a rank by ZeRO stage and offload");
  plan->add_option("--parameters", options.parameters,
                   "Plan for a model of so many parameters (such as 8B), not the config's")
      ->check(between(1, 1e15));
  plan->add_option("--layers", options.layers, "Units of that model, all alike")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str()
      ->needs("--parameters");
  add_model_and_machine(plan, options);
  plan->add_option("--tokens", options.tokens,
                   "Tokens per step and rank (default: the config's batch)")
      ->check(between(1, 1e15));
  add_rates(plan, options);
  add_output(plan, "-o,--output", options.output_file,
             "Write a config with the keys of CONFIG and --set, and with the plan's budgets");
  add_output(plan, "--json", options.json_file, "Write the plan");
  add_output(plan, "--plot", options.plot_file,
             "Draw the step and its resources over budgets of host memory, as SVG");
}

}  // namespace sluice
