#include "tools/plan_command.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/topology.h"
#include "base/units.h"
#include "gpu/cuda_device.h"
#include "tools/compute_factor.h"
#include "tools/exit_codes.h"
#include "tools/gpt/gpt_model.h"
#include "tools/order_choice.h"
#include "tools/planner.h"
#include "tools/rank_memory.h"
#include "tools/stage_table.h"
#include "tools/train_config.h"

namespace sluice {
namespace {

constexpr double kSecondsADay = 86400;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kConfig, "plan: " + message);
}

struct Subject {
  PlanRequest request;
  PlanRates rates;
  std::array<OrderPlan, 2> orders;
  double parameters = 0;  // of the whole model
  double tokens = 0;      // of a step and rank
};

ModelSpec uniform_model(double parameters, std::uint32_t layers) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < layers; ++i)
    model.units.push_back(
        {.name = fmt::format("layer.{}", i),
         .tensors = {{.name = fmt::format("layer.{}.weight", i),
                      .shape = {static_cast<std::uint64_t>(std::ceil(parameters / layers))}}}});
  return model;
}

// Where the engine keeps activations: those of a micro-batch of `tokens`, fp32, between units of
// 12 W^2 parameters, as a transformer's block of width W has.
void add_boundaries(ModelSpec& model, double parameters, std::uint32_t layers, double tokens) {
  const double width = std::sqrt(parameters / layers / 12);
  model.boundary_bytes.assign(
      layers - 1, static_cast<std::uint64_t>(std::ceil(tokens * std::ceil(width)) * sizeof(float)));
}

Subject subject_of(const PlanOptions& options) {
  ConfigDocument document = ConfigDocument::from_file(options.config_file);
  for (const std::string& assignment : options.assignments) document.set(assignment);
  const TrainConfig config = train_config(document);
  if (options.parameters && !(*options.parameters >= options.layers && *options.parameters < 1e15))
    refuse(fmt::format("--parameters {} in {} layers", *options.parameters, options.layers));
  ModelSpec model = options.parameters ? uniform_model(*options.parameters, options.layers)
                                       : training_model(config);
  Subject subject;
  subject.rates = plan_rates(options.rates, state_format(config.engine));
  subject.tokens = options.tokens.value_or(static_cast<double>(config.sequences) *
                                           config.micro_batches * config.model.context);
  if (!(subject.tokens > 0)) refuse(fmt::format("--tokens {} is not positive", subject.tokens));
  PlanRequest& request = subject.request;
  request.config = config.engine;
  validate(request.config);
  fill_budgets(request.config.memory);
  if (options.parameters && config.engine.activations.home != ActivationHome::kKeep)
    add_boundaries(model, *options.parameters, options.layers,
                   subject.tokens / config.micro_batches);
  if (options.ranks > 1 && request.config.sharding.group_is_node)
    throw Error(ErrorCode::kConfig,
                "sharding.group is \"node\": a plan does not know how many ranks a host will have; "
                "set it to their number");
  request.model = model;
  request.ranks = options.ranks;
  request.micro_batches = config.micro_batches;
  const ModelSpec valid = validated(request.model);
  subject.orders = plan_orders(request.config, valid, options.ranks);
  request.order = config.order.value_or(better_order(subject.orders, valid));
  request.config.activations.order = request.order;
  request.fills_device = config.device == DeviceChoice::kCuda ||
                         (config.device == DeviceChoice::kAuto && why_no_cuda_device().empty());
  request.rates = subject.rates.rates;
  request.flops = subject.rates.flops;
  for (const UnitSpec& unit : model.units) {
    double elements = 0;
    for (const TensorSpec& tensor : unit.tensors)
      elements += static_cast<double>(tensor.element_count());
    subject.parameters += elements;
    // A multiplication and an addition a parameter and token.
    request.forward_flops.push_back(2 * elements * subject.tokens / config.micro_batches);
  }
  return subject;
}

// --- What is printed ---

void print_pools(const PlannedPlacement& planned) {
  fmt::print("{:<8}{:<24}{:>10}  {}\n", "tier", "pool", "size", "what for");
  for (const Pool& pool : planned.placement.pools()) {
    if (pool.size_bytes == 0) continue;
    fmt::print("{:<8}{:<24}{:>10}  {}\n", name_of(pool.tier), pool.name,
               format_bytes(pool.size_bytes), pool.reason);
  }
  fmt::print("{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}\n", "device", "= sum",
             format_bytes(planned.placement.device_bytes()),
             "of a budget of " + format_bytes(planned.placement.device_budget_bytes), "host",
             "= sum", format_bytes(planned.placement.host_bytes()),
             "of a budget of " + format_bytes(planned.placement.host_budget_bytes), "nvme", "= sum",
             format_bytes(planned.placement.nvme_bytes()));
}

void print_step(const PlannedPlacement& planned) {
  fmt::print("\none step, {}: {:.4g} s; {} binds\n", name_of(planned.policy), planned.step.step_s,
             name_of(planned.step.scarcest()));
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    if (planned.step.busy_s[i] == 0) continue;
    fmt::print("  {:<24}busy {:>10.4g} s  {:>5.1f} %\n", name_of(static_cast<Resource>(i)),
               planned.step.busy_s[i], 100 * planned.step.busy_s[i] / planned.step.step_s);
  }
  fmt::print("  reads {} from storage and writes {}\n",
             format_bytes(planned.step.traffic.nvme_read_bytes),
             format_bytes(planned.step.traffic.nvme_write_bytes));
  if (const std::uint64_t bytes = planned.step.traffic.gradient_spill_bytes; bytes != 0)
    fmt::print("  of both, {} are gradients, which wait on storage (placement.gradients)\n",
               format_bytes(bytes));
  fmt::print("T_min {:.4g} s ({}). By policy:\n", planned.least.step_s,
             name_of(planned.least.scarcest()));
  for (const auto& [policy, cost] : planned.policies)
    fmt::print("  {:<12}{:>10.4g} s  {:>5.1f} % of T_min\n", name_of(policy), cost.step_s,
               100 * planned.least.step_s / cost.step_s);
}

void print_alternatives(const std::vector<PlannedPlacement>& all) {
  fmt::print("\n{:<8}{:>10}{:>10}{:>10}{:>12}{:>10}  {}\n", "state in", "device", "host", "nvme",
             "written", "step s", "what binds");
  for (const PlannedPlacement& planned : all) {
    if (!planned.obstacle.empty()) {
      fmt::print("{:<8}{}\n", planned.name,
                 planned.obstacle.substr(0, planned.obstacle.find('\n')));
      continue;
    }
    fmt::print("{:<8}{:>10}{:>10}{:>10}{:>12}{:>10.4g}  {}\n", planned.name,
               format_bytes(planned.placement.device_bytes()),
               format_bytes(planned.placement.host_bytes()),
               format_bytes(planned.placement.nvme_bytes()),
               format_bytes(planned.step.traffic.nvme_write_bytes), planned.step.step_s,
               name_of(planned.step.scarcest()));
  }
}

// Steps that the drives' rating lasts for; nothing when nothing is written or no rating given.
std::optional<double> steps_of_life(const PlanOptions& options, const PlannedPlacement& planned) {
  const std::uint64_t written = planned.step.traffic.nvme_write_bytes;
  if (options.bytes_written_rating.empty() || written == 0) return std::nullopt;
  return static_cast<double>(parse_size(options.bytes_written_rating)) /
         static_cast<double>(written);
}

// --- JSON ---

nlohmann::ordered_json json_of(const StepCost& cost) {
  nlohmann::ordered_json busy = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < kResourceCount; ++i)
    busy[std::string(name_of(static_cast<Resource>(i)))] = cost.busy_s[i];
  return {{"step_s", cost.step_s},
          {"binds", name_of(cost.scarcest())},
          {"busy_s", busy},
          {"nvme_read_bytes", cost.traffic.nvme_read_bytes},
          {"nvme_write_bytes", cost.traffic.nvme_write_bytes},
          {"gradient_spill_bytes", cost.traffic.gradient_spill_bytes},
          {"activation_out_bytes", cost.traffic.activation_out_bytes},
          {"activation_in_bytes", cost.traffic.activation_in_bytes}};
}

nlohmann::ordered_json json_of(const PlannedPlacement& planned) {
  nlohmann::ordered_json root = {{"name", planned.name}, {"fits", planned.obstacle.empty()}};
  if (!planned.obstacle.empty()) {
    root["obstacle"] = planned.obstacle;
    return root;
  }
  root["device_bytes"] = planned.placement.device_bytes();
  root["host_bytes"] = planned.placement.host_bytes();
  root["nvme_bytes"] = planned.placement.nvme_bytes();
  root["compute_s"] = planned.compute_s;
  root["policy"] = name_of(planned.policy);
  root["step"] = json_of(planned.step);
  if (!planned.policies.empty()) root["t_min_s"] = planned.least.step_s;
  for (const auto& [policy, cost] : planned.policies)
    root["policies"][std::string(name_of(policy))] = json_of(cost);
  for (const Pool& pool : planned.placement.pools())
    root["pools"].push_back(
        {{"tier", name_of(pool.tier)}, {"pool", pool.name}, {"size_bytes", pool.size_bytes}});
  return root;
}

nlohmann::ordered_json json_of(const StageMemory& stage) {
  nlohmann::ordered_json root = {{"parameter_bytes", stage.parameter_bytes},
                                 {"window_bytes", stage.window_bytes},
                                 {"gradient_bytes", stage.gradient_bytes},
                                 {"optimizer_bytes", stage.optimizer_bytes},
                                 {"fits", stage.obstacle.empty()}};
  if (stage.obstacle.empty()) {
    root["most_in_use_bytes"] = json_of(stage.most_in_use);
  } else {
    root["obstacle"] = stage.obstacle;
  }
  return root;
}

void write_json(const PlanOptions& options, const Subject& subject,
                const std::vector<PlannedPlacement>& all, std::optional<double> free_tokens) {
  nlohmann::ordered_json root = {
      {"parameters", subject.parameters},
      {"ranks", options.ranks},
      {"tokens", subject.tokens},
      {"free_from_tokens", free_tokens ? nlohmann::ordered_json(*free_tokens) : nullptr},
      {"steps_of_drive_life", nullptr},
      {"order", name_of(subject.request.order)},
      {"placements", nlohmann::ordered_json::array()}};
  if (const auto steps = steps_of_life(options, all.front())) root["steps_of_drive_life"] = *steps;
  for (const PlannedPlacement& planned : all) root["placements"].push_back(json_of(planned));
  if (options.stages) {
    for (const StageMemory& stage : memory_by_stage(subject.request))
      root["stages"].push_back(json_of(stage));
  }
  std::ofstream file(options.json_file);
  file << root.dump(2) << '\n';
  file.close();
  if (!file)
    throw Error(ErrorCode::kInput, fmt::format("cannot write \"{}\": {}; choose another place",
                                               options.json_file, errno_text(errno)));
}

}  // namespace

int run_plan(const PlanOptions& options) {
  const Subject subject = subject_of(options);
  const std::vector<PlannedPlacement> all = plan_alternatives(subject.request);
  const PlannedPlacement& own = all.front();
  const bool fits = own.obstacle.empty();
  std::optional<double> free_tokens;
  if (fits) {
    if (const auto factor = compute_factor_that_hides(subject.request, own))
      free_tokens = *factor * subject.tokens;
  }
  fmt::print("{:.4g} parameters on {} {}; {:.4g} tokens a step and rank\n", subject.parameters,
             options.ranks, options.ranks == 1 ? "rank" : "ranks, of which this is one",
             subject.tokens);
  for (const std::string& source : subject.rates.sources) fmt::print("  {}\n", source);
  if (fits) {
    print_pools(own);
    print_step(own);
    if (subject.request.micro_batches > 1)
      fmt::print("{}\n", describe(subject.orders, subject.request.order));
  } else {
    fmt::print("this config does not fit: {}\n", own.obstacle);
  }
  print_alternatives(all);
  if (free_tokens)
    fmt::print("\nfrom {:.3g} tokens a step and rank on, computation hides all else to 5 %\n",
               *free_tokens);
  if (const auto steps = fits ? steps_of_life(options, own) : std::nullopt)
    fmt::print("{} written last for {:.3g} steps, {:.3g} days of this\n",
               options.bytes_written_rating, *steps, *steps * own.step.step_s / kSecondsADay);
  if (options.stages) fmt::print("{}", stage_table(subject.request));
  if (options.ranks > 1) fmt::print("collectives take no time in this plan\n");
  if (!options.json_file.empty()) write_json(options, subject, all, free_tokens);
  return fits ? kExitOk : kExitResource;
}

}  // namespace sluice
