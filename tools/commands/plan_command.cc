#include "tools/commands/plan_command.h"

#include <unistd.h>

#include <array>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/planner/compute_factor.h"
#include "engine/planner/planner.h"
#include "engine/planner/quicker.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/plan_json.h"
#include "tools/commands/plan_model.h"
#include "tools/deepspeed/config_source.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/order_choice.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/train_ranks.h"
#include "tools/report/deepspeed_estimate.h"
#include "tools/report/rank_memory.h"
#include "tools/report/stage_table.h"

namespace sluice {
namespace {

[[noreturn]] void refuse_plan(const std::string& message) {
  throw Error(ErrorCode::kConfig, "plan: " + message);
}

struct Subject {
  PlanRequest request;
  bool is_on_host = true;
  bool is_of_this_machine = true;  // and of the config's model, so that train could be started here
  HostMemory host;
  std::uint64_t activation_bytes = 0;  // that the application keeps
  PlanRates rates;
  std::array<OrderPlan, 2> orders;
  std::string obstacle_here;
  double parameters = 0;  // of the whole model
  double active_parameters = 0;
  std::string tensors;  // JSON, if --tensors asks for it
  std::string description;
  double tokens = 0;  // of a step and rank
};

// A file of its own, or DeepSpeed's, or none: all defaults.
ConfigDocument document_of(const PlanOptions& options) {
  DeepspeedValues values = options.deepspeed;
  values.ranks = options.ranks;
  if (!options.config_file.empty())
    return read_config_source(options.config_file, values, options.assignments).document;
  ConfigDocument document("{}", "no config");
  for (const std::string& assignment : options.assignments) document.set(assignment);
  return document;
}

// The GPU memory that is left beside the activations.
std::uint64_t device_budget(const GpuPreset& gpu, std::uint64_t activation_bytes) {
  const std::uint64_t beside_bytes = activation_bytes + kGpuContextBytes;
  if (beside_bytes < gpu.memory_bytes) return gpu.memory_bytes - beside_bytes;
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("does not fit: activations of {} and {} for the driver are more than the "
                          "{} of a {}; lower --tokens, or --set activations=recompute",
                          format_bytes(activation_bytes), format_bytes(kGpuContextBytes),
                          format_bytes(gpu.memory_bytes), gpu.name));
}

// Settles the budgets that are not given.
void settle(Subject& subject, const PlanOptions& options, Config& engine) {
  if (!options.gpu.empty() && !engine.memory.device_bytes)
    engine.memory.device_bytes = device_budget(gpu_preset(options.gpu), subject.activation_bytes);
  if (!options.host_memory.empty()) engine.memory.host_bytes = parse_size(options.host_memory);
  subject.host = share_of_host(subject.is_on_host, subject.activation_bytes, options.ranks);
  settle_budgets(engine.memory, subject.host);
}

PlanRateOptions rates_of(const PlanOptions& options) {
  PlanRateOptions rates = options.rates;
  if (!options.gpu.empty() && !rates.flops)
    rates.flops = kReachedShare * gpu_preset(options.gpu).flops;
  return rates;
}

Subject subject_of(const PlanOptions& options) {
  TrainConfig config = train_config(document_of(options));
  Subject subject;
  subject.rates = plan_rates(rates_of(options), state_format(config.engine));
  if (options.gpu.empty()) check_gpu_config(config);
  if (options.ranks > 1) {
    check_ranks_config(config);
    share_host_among(options.ranks, config);
  }
  validate(config.engine);
  subject.is_on_host = options.gpu.empty() && computes_on_host(config);
  subject.is_of_this_machine = options.gpu.empty() && options.host_memory.empty() &&
                               options.ranks == 1 && !options.config_file.empty() &&
                               options.model.empty() && !options.parameters;
  PlanModel model = plan_model(config, options, subject.is_on_host);
  if (!(model.tokens > 0)) refuse_plan(fmt::format("--tokens {} is not positive", model.tokens));
  subject.tokens = model.tokens;
  subject.description = model.description;
  subject.activation_bytes = model.activation_bytes;
  settle(subject, options, config.engine);
  PlanRequest& request = subject.request;
  request.config = config.engine;
  if (options.ranks > 1 && request.config.sharding.group_is_node)
    throw Error(ErrorCode::kConfig,
                "sharding.group is \"node\": a plan does not know how many ranks a host will have; "
                "set it to their number");
  for (const UnitSpec& unit : model.spec.units) {
    for (const TensorSpec& tensor : unit.tensors)
      subject.parameters += static_cast<double>(tensor.element_count());
  }
  subject.active_parameters = model.active_parameters;
  if (!options.tensors_file.empty()) subject.tensors = tensors_json(model);
  request.model = std::move(model.spec);
  request.forward_flops = std::move(model.forward_flops);
  request.micro_batches = config.micro_batches;
  const ModelSpec valid = validated(request.model);
  request.machine = machine_of(subject.host, options.ranks);
  request.machine.device_bytes = host_device_bytes(config.engine);
  subject.orders = plan_orders(request.config, valid, request.machine);
  request.order = config.order.value_or(better_order(subject.orders, valid));
  request.config.activations.order = request.order;
  request.rates = subject.rates.rates;
  request.flops = subject.rates.flops;
  return subject;
}

// --- What is printed ---

// Why `sluice train` would refuse here what the budgets allow; empty where it would not.
std::string obstacle_here(const PlannedPlacement& own, const Subject& subject) {
  const bool matters = subject.request.config.memory.check == RoomCheck::kError;
  if (!own.obstacle.empty() || !subject.is_of_this_machine || !matters) return {};
  return shortage_of(with_pools(subject.host, own.placement)).value_or("");
}

// The first line: the verdict, which the rest explains.
std::string verdict(const std::vector<PlannedPlacement>& all, const Subject& subject) {
  const PlanRequest& request = subject.request;
  const PlannedPlacement& own = all.front();
  if (!own.obstacle.empty()) return fmt::format("does not fit: {}", in_short(own.obstacle));
  if (const std::string& here = subject.obstacle_here; !here.empty())
    return fmt::format("does not fit this machine: {}", in_short(here));
  const std::string line = fmt::format("fits: {:.3g} s a step, bound by {}", own.step.step_s,
                                       name_of(own.step.scarcest()));
  // The least change that helps: settings cost nothing, memory does.
  if (const std::optional<Quicker> quicker = quicker_than(all, request.config))
    return line + fmt::format("; {} makes it {:.3g} s", settings_of(*quicker, request.config),
                              quicker->step_s);
  if (const std::optional<MoreMemory> more = more_memory_for(request, own))
    return line + fmt::format("; {} more host memory makes it {:.3g} s",
                              format_bytes(more->more_bytes), more->step_s);
  return line;
}

void print_pools(const PlannedPlacement& planned, const Subject& subject) {
  say("{:<8}{:<24}{:>10}  {}\n", "tier", "pool", "size", "what for");
  for (const Pool& pool : planned.placement.pools()) {
    if (pool.size_bytes == 0) continue;
    say("{:<8}{:<24}{:>10}  {}\n", name_of(pool.tier), pool.name, format_bytes(pool.size_bytes),
        pool.reason);
  }
  say("{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}\n", "device", "= sum",
      format_bytes(planned.placement.device_bytes()),
      "of a budget of " + format_bytes(planned.placement.device_budget_bytes), "host", "= sum",
      format_bytes(planned.placement.host_bytes()),
      "of a budget of " + format_bytes(planned.placement.host_budget_bytes), "nvme", "= sum",
      format_bytes(planned.placement.nvme_bytes()));
  const std::uint64_t device_bytes = planned.placement.device_bytes();
  say("{:<8}{:<24}{:>10}  the application's, beside the budgets{}\n", "-", "activations",
      format_bytes(subject.activation_bytes),
      subject.is_on_host ? ""
                         : fmt::format("; with them the GPU holds {}",
                                       format_bytes(device_bytes + subject.activation_bytes)));
  say("{:<8}{:<24}{:>10}  all that is in the host's memory, the program included\n", "-", "= sum",
      format_bytes(with_pools(subject.host, planned.placement).sum_bytes()));
}

void print_step(const PlannedPlacement& planned) {
  say("\none step, {}: {:.4g} s; {} binds\n", name_of(planned.policy), planned.step.step_s,
      name_of(planned.step.scarcest()));
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    if (planned.step.busy_s[i] == 0) continue;
    say("  {:<24}busy {:>10.4g} s  {:>5.1f} %\n", name_of(static_cast<Resource>(i)),
        planned.step.busy_s[i], 100 * planned.step.busy_s[i] / planned.step.step_s);
  }
  say("  reads {} from storage and writes {}\n", format_bytes(planned.step.traffic.nvme_read_bytes),
      format_bytes(planned.step.traffic.nvme_write_bytes));
  if (const std::uint64_t bytes = planned.placement.commit_bytes; bytes != 0)
    say("  a commit writes {} more, the state at home in memory\n", format_bytes(bytes));
  if (const std::uint64_t bytes = planned.step.traffic.gradient_spill_bytes; bytes != 0)
    say("  of these, {} are gradients that wait on storage (placement.gradients)\n",
        format_bytes(bytes));
  say("T_min {:.4g} s ({}). By policy:\n", planned.least.step_s, name_of(planned.least.scarcest()));
  for (const auto& [policy, cost] : planned.policies)
    say("  {:<12}{:>10.4g} s  {:>5.1f} % of T_min\n", name_of(policy), cost.step_s,
        100 * planned.least.step_s / cost.step_s);
}

void print_alternatives(const std::vector<PlannedPlacement>& all) {
  say("\n{:<8}{:>10}{:>10}{:>10}{:>12}{:>10}  {}\n", "state in", "device", "host", "nvme",
      "written", "step s", "what binds");
  for (const PlannedPlacement& planned : all) {
    if (!planned.obstacle.empty()) {
      say("{:<8}{}\n", planned.name, in_short(planned.obstacle));
      continue;
    }
    say("{:<8}{:>10}{:>10}{:>10}{:>12}{:>10.4g}  {}\n", planned.name,
        format_bytes(planned.placement.device_bytes()),
        format_bytes(planned.placement.host_bytes()), format_bytes(planned.placement.nvme_bytes()),
        format_bytes(planned.step.traffic.nvme_write_bytes), planned.step.step_s,
        name_of(planned.step.scarcest()));
  }
}

// Where another row, or another policy, is quicker than the config, what to set.
void print_quicker(const std::vector<PlannedPlacement>& all, const Config& config) {
  const std::optional<Quicker> quicker = quicker_than(all, config);
  if (!quicker) return;
  say("{:.4g} s, {:.1f} % less than config, with {}\n", quicker->step_s,
      100 * (1 - quicker->step_s / all.front().step.step_s), settings_of(*quicker, config));
}

// Steps that the drives' rating lasts for; nothing when nothing is written or no rating given.
std::optional<double> steps_of_life(const PlanOptions& options, const PlannedPlacement& planned,
                                    std::uint32_t commit_every) {
  const std::uint64_t written =
      planned.step.traffic.nvme_write_bytes + planned.placement.commit_bytes / commit_every;
  if (options.bytes_written_rating.empty() || written == 0) return std::nullopt;
  return static_cast<double>(parse_size(options.bytes_written_rating)) /
         static_cast<double>(written);
}

// --- JSON ---

void write_json(OutputFile& output, const PlanOptions& options, const Subject& subject,
                const std::vector<PlannedPlacement>& all, std::optional<double> free_tokens) {
  nlohmann::ordered_json root = {
      {"parameters", subject.parameters},
      {"active_parameters", subject.active_parameters},
      {"optimizer_state", name_of(subject.request.config.optimizer.state)},
      {"ranks", options.ranks},
      {"tokens", subject.tokens},
      {"free_from_tokens", free_tokens ? nlohmann::ordered_json(*free_tokens) : nullptr},
      {"steps_of_drive_life", nullptr},
      {"order", name_of(subject.request.order)},
      {"activation_bytes", subject.activation_bytes},
      {"obstacle_here", subject.obstacle_here},
      {"placements", nlohmann::ordered_json::array()}};
  if (const auto steps =
          steps_of_life(options, all.front(), subject.request.config.storage.state.commit_every))
    root["steps_of_drive_life"] = *steps;
  for (const PlannedPlacement& planned : all) root["placements"].push_back(json_of(planned));
  if (options.stages) {
    for (const StageMemory& stage : memory_by_stage(subject.request))
      root["stages"].push_back(json_of(stage));
  }
  if (options.as_deepspeed) {
    for (const DeepspeedEstimate& row : deepspeed_estimates(
             deepspeed_subject(subject.request.model, options.ranks, options.nodes)))
      root["deepspeed"].push_back(
          {{"options", row.options()}, {"cpu_bytes", row.cpu_bytes}, {"gpu_bytes", row.gpu_bytes}});
  }
  write_whole(output, root.dump(2) + "\n");
}

void print_deepspeed(const PlanOptions& options, const Subject& subject,
                     const PlannedPlacement& own) {
  const DeepspeedSubject model =
      deepspeed_subject(subject.request.model, options.ranks, options.nodes);
  say("{}", deepspeed_table(model));
  if (!own.obstacle.empty()) return;
  say("Sluice, this config: {} on a GPU, {} in a node's memory, {} on its drives\n",
      format_bytes(own.placement.device_bytes()),
      format_bytes(options.ranks / options.nodes * own.placement.host_bytes()),
      format_bytes(options.ranks / options.nodes * own.placement.nvme_bytes()));
}

std::string planned_stages(const PlanRequest& request) {
  const Progress progress("planning every ZeRO stage");
  return stage_table(request);
}

}  // namespace

int run_plan(const PlanOptions& options) {
  if (options.ranks % options.nodes != 0)
    refuse_plan(fmt::format("--nodes {} does not divide --ranks {}", options.nodes, options.ranks));
  Subject subject = subject_of(options);
  OutputFiles outputs;
  outputs.add_input("the config", options.config_file);
  outputs.add_input("--model", options.model);
  outputs.add_input("storage.calibration", subject.request.config.storage.calibration);
  outputs.add_input("--io", options.rates.io_file);
  outputs.add_input("--adam", options.rates.adam_file);
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& tensors = outputs.add("--tensors", options.tensors_file);
  outputs.check();
  if (tensors.is_wanted()) write_whole(tensors, subject.tensors);
  std::optional<Progress> progress(std::in_place, "planning every place for the state");
  const std::vector<PlannedPlacement> all = plan_alternatives(subject.request);
  const PlannedPlacement& own = all.front();
  const bool fits = own.obstacle.empty();
  subject.obstacle_here = obstacle_here(own, subject);
  const bool trains = fits && subject.obstacle_here.empty();
  std::optional<double> free_tokens;
  if (fits) progress->set("looking for the computation that hides all else");
  if (const auto factor = compute_factor_that_hides(subject.request, own))
    free_tokens = *factor * subject.tokens;
  const std::string first_line = verdict(all, subject);
  progress.reset();
  say("{}\n{}", coloured(STDOUT_FILENO, trains ? Colour::kGood : Colour::kBad, first_line),
      subject.description);
  say("{:.4g} parameters on {} {}; {:.4g} tokens a step and rank\n", subject.parameters,
      options.ranks, options.ranks == 1 ? "rank" : "ranks, of which this is one", subject.tokens);
  if (const OptimizerState state = subject.request.config.optimizer.state;
      state != OptimizerState::kFp32)
    say("moments in {} (optimizer.state)\n", name_of(state));
  for (const std::string& source : subject.rates.sources) say("  {}\n", source);
  if (fits) {
    print_pools(own, subject);
    print_step(own);
    if (subject.request.micro_batches > 1)
      say("{}\n", describe(subject.orders, subject.request.order));
  } else {
    say("this config does not fit: {}\n", own.obstacle);
  }
  if (fits && !trains) say("\nhere, sluice train would refuse this: {}\n", subject.obstacle_here);
  print_alternatives(all);
  if (fits) print_quicker(all, subject.request.config);
  if (free_tokens)
    say("\nfrom {:.3g} tokens a step and rank on, computation hides everything else to within 5 "
        "%\n",
        *free_tokens);
  if (const auto steps =
          fits ? steps_of_life(options, own, subject.request.config.storage.state.commit_every)
               : std::nullopt)
    say("{} written last for {:.3g} steps, {:.3g} days of this\n", options.bytes_written_rating,
        *steps, *steps * own.step.step_s / 86400);
  if (options.stages) say("{}", planned_stages(subject.request));
  if (options.as_deepspeed) print_deepspeed(options, subject, own);
  if (options.ranks > 1) say("collectives take no time in this plan\n");
  if (json.is_wanted()) write_json(json, options, subject, all, free_tokens);
  return trains ? kExitOk : kExitResource;
}

}  // namespace sluice
