#include "tools/commands/plan_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "engine/planner/quicker.h"
#include "tools/cli/json_text.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/plan_json.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/report/deepspeed_estimate.h"
#include "tools/report/stage_table.h"

namespace sluice {
namespace {

void print_pools(const PlannedPlacement& planned, const PlanSubject& subject) {
  say("{:<8}{:<24}{:>10}  {}\n", "tier", "pool", "size", "what for");
  for (const Pool& pool : planned.placement.pools()) {
    if (pool.size_bytes == 0) continue;
    say("{:<8}{:<24}{:>10}  {}\n", name_of(pool.tier), pool.name, format_bytes(pool.size_bytes),
        pool.reason);
  }
  say("{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}  {}\n{:<8}{:<24}{:>10}\n", "device", "= sum",
      format_bytes(planned.placement.device_bytes()),
      "of a budget of " + format_bytes(planned.placement.device_budget_bytes) +
          (subject.is_on_host ? ", host memory, too: the sum below counts both" : ""),
      "host", "= sum", format_bytes(planned.placement.host_bytes()),
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

// The share of the GPU's data sheet that a step's products reach; empty without --gpu.
std::optional<double> mfu_of(const PlanSubject& subject, const PlannedPlacement& planned) {
  if (!subject.peak_flops) return std::nullopt;
  return subject.model_flops / planned.step.step_s / *subject.peak_flops;
}

// The bytes that a step moves, commits and gradients included.
void print_storage(const PlannedPlacement& planned, const PlanRequest& request) {
  const Traffic& traffic = planned.step.traffic;
  say("  reads {} from storage and writes {}\n", format_bytes(traffic.nvme_read_bytes),
      format_bytes(traffic.nvme_write_bytes));
  if (traffic.gradient_spill_bytes != 0)
    say("  of both, {} are gradients that wait on storage (placement.gradients){}\n",
        format_bytes(traffic.gradient_spill_bytes),
        request.micro_batches == 1
            ? ""
            : fmt::format(", {} for each of {} micro-batches",
                          format_bytes(traffic.gradient_spill_bytes / request.micro_batches),
                          request.micro_batches));
  const std::uint32_t every = request.config.storage.state.commit_every;
  if (const std::uint64_t bytes = planned.placement.commit_bytes; bytes != 0)
    say("  of the writes, {} are a commit's, of state at home in memory{}\n", format_bytes(bytes),
        every == 1 ? "" : fmt::format(", once in {} steps", every));
}

void print_step(const PlannedPlacement& planned, const PlanSubject& subject) {
  const std::optional<double> mfu = mfu_of(subject, planned);
  say("\none step, {}: {:.4g} s; {} binds; {:.4g} TFLOP/s{}\n", name_of(planned.policy),
      planned.step.step_s, name_of(planned.step.scarcest()),
      1e-12 * subject.model_flops / planned.step.step_s,
      mfu ? fmt::format(
                ", MFU {:.1f} %{}", 100 * *mfu,
                *mfu > 1 ? ", which is more than the GPU can: check the rate of computation" : "")
          : "");
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    if (planned.step.busy_s[i] == 0) continue;
    say("  {:<24}busy {:>10.4g} s  {:>5.1f} %\n", name_of(static_cast<Resource>(i)),
        planned.step.busy_s[i], 100 * planned.step.busy_s[i] / planned.step.step_s);
  }
  print_storage(planned, subject.request);
  say("T_min {:.4g} s ({}). By policy:\n", planned.least.step_s, name_of(planned.least.scarcest()));
  for (const PlannedChange& change : planned.policies)
    say("  {:<12}{:>10.4g} s  {:>5.1f} % of T_min\n", name_of(change.policy), change.step.step_s,
        100 * planned.least.step_s / change.step.step_s);
  if (const auto& other = planned.on_other_processor)
    say("with optimizer.update_on {}: {:.4g} s ({} binds)\n",
        name_of(other_than(subject.request.config.optimizer.update_on)), other->step.step_s,
        name_of(other->step.scarcest()));
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

// Why "auto" has not chosen what would be quicker; empty where the config does not leave it to
// "auto".
std::string why_not_auto(const Quicker& quicker, const Config& config) {
  std::string why;
  const auto is_left = [](TierChoice given, TierChoice wanted) {
    return given == TierChoice::kAuto && wanted != given;
  };
  if (is_left(config.placement.parameters, quicker.placement.parameters) ||
      is_left(config.placement.optimizer, quicker.placement.optimizer))
    why +=
        "; auto moves the fewest bytes: memory goes to parameters first, then to the optimizer's "
        "state, at any rates";
  if (config.optimizer.overlap != OverlapPolicy::kAuto || quicker.overlap == OverlapPolicy::kAuto)
    return why;
  // Other rules, since a commit's copies of the state serve as those of speculation.
  if (!config.storage.state.name.empty())
    return why +
           "; with a durable store, auto speculates on one rank that commits every update, where "
           "the gradients wait in host memory and all of the state is on storage";
  return why +
         "; auto speculates where the gradients wait in host memory, nearly all of the state is on "
         "storage, and each path has room for the state and its copy, and as much again";
}

// Training without clipping is another training, so it is named only where it wins this much.
constexpr double kNamedPercent = 5;

// Where another row, or another policy, is quicker than the config, what to set.
void print_quicker(const std::vector<PlannedPlacement>& all, const Config& config) {
  const PlannedPlacement& own = all.front();
  const std::optional<Quicker> quicker = quicker_than(all, config);
  const double least_s = quicker ? quicker->step_s : own.step.step_s;
  const auto less_percent = [&](double step_s) { return 100 * (1 - step_s / own.step.step_s); };
  if (quicker)
    say("{:.4g} s, {:.1f} % less than config, with {}{}\n", least_s, less_percent(least_s),
        settings_of(*quicker, config), why_not_auto(*quicker, config));
  Config without_clipping = config;
  without_clipping.optimizer.clip_norm = 0;
  const auto eager = std::ranges::find(own.policies, OverlapPolicy::kEager, &PlannedChange::policy);
  if (config.optimizer.clip_norm == 0 || !may_be_eager(without_clipping) ||
      eager == own.policies.end())
    return;
  const double eager_s = eager->step.step_s;
  if (less_percent(eager_s) >= kNamedPercent && eager_s < least_s)
    say("{:.4g} s, {:.1f} % less than config, without clipping (optimizer.clip_norm 0), which "
        "changes results: updates then begin in backward (eager)\n",
        eager_s, less_percent(eager_s));
}

// Steps that the drives' rating lasts for; nothing when nothing is written, no rating given, or the
// config does not fit.
std::optional<double> steps_of_life(const PlanSubject& subject, const PlannedPlacement& planned) {
  if (!planned.obstacle.empty()) return std::nullopt;
  const std::uint64_t written = planned.step.traffic.nvme_write_bytes;  // commits included
  if (!subject.rated_bytes || written == 0) return std::nullopt;
  return *subject.rated_bytes / static_cast<double>(written);
}

// The collectives of a step, which run beside everything else in a plan.
void print_links(const PlannedPlacement& planned) {
  const RankTraffic& traffic = planned.rank_traffic;
  const double link_s = planned.step.busy(Resource::kLinks);
  say("{}: a rank gathers {} and reduces {} in a step{}\n",
      link_s == 0 ? "collectives take no time in this plan (--link-rate)"
                  : fmt::format("collectives take {:.4g} s beside the rest", link_s),
      format_bytes(traffic.gathered_bytes), format_bytes(traffic.reduced_bytes),
      traffic.crossed_bytes == 0 ? ""
                                 : fmt::format(", and {} go to other groups or nodes",
                                               format_bytes(traffic.crossed_bytes)));
}

void print_deepspeed(const PlanOptions& options, const PlanSubject& subject,
                     const PlannedPlacement& own) {
  const DeepspeedSubject model =
      deepspeed_subject(subject.request.model, options.ranks, options.nodes.value_or(1));
  say("{}", deepspeed_table(model));
  if (!own.obstacle.empty()) return;
  say("Sluice, this config: {} on a GPU, {} in a node's memory, {} on its drives\n",
      format_bytes(own.placement.device_bytes()),
      format_bytes(options.ranks / options.nodes.value_or(1) * own.placement.host_bytes()),
      format_bytes(options.ranks / options.nodes.value_or(1) * own.placement.nvme_bytes()));
}

// Settings cost nothing, so they come beside the budget that the obstacle names.
std::string settings_that_fit(const std::vector<PlannedPlacement>& all, const Config& config) {
  const std::optional<Quicker> fitting = quickest_that_fits(all, config);
  if (!fitting) return "";
  return fmt::format("; with {} it fits: {:.3g} s per step", settings_of(*fitting, config),
                     fitting->step_s);
}

std::string planned_stages(const PlanRequest& request) {
  const Progress progress("planning every ZeRO stage");
  return stage_table(request);
}

}  // namespace

std::string plan_verdict(const std::vector<PlannedPlacement>& all, const PlanSubject& subject) {
  const PlanRequest& request = subject.request;
  const PlannedPlacement& own = all.front();
  if (!own.obstacle.empty())
    return fmt::format("does not fit: {}{}{}", in_short(own.obstacle),
                       settings_that_fit(all, request.config), subject.remedy);
  if (const std::string& here = subject.obstacle_here; !here.empty())
    return fmt::format("does not fit this machine: {}", in_short(here));
  const std::string line = fmt::format("fits: {:.3g} s per step, bound by {}", own.step.step_s,
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

void print_plan(const PlanOptions& options, const PlanSubject& subject,
                const std::vector<PlannedPlacement>& all, const PlanFindings& findings) {
  const PlannedPlacement& own = all.front();
  const bool fits = own.obstacle.empty();
  const bool trains = fits && subject.obstacle_here.empty();
  say("{}\n{}",
      coloured(said_descriptor(), trains ? Colour::kGood : Colour::kBad, findings.verdict),
      subject.description);
  say("{:.4g} parameters on {} {}; {:.4g} tokens per step and rank\n", subject.parameters,
      options.ranks, options.ranks == 1 ? "rank" : "ranks, of which this is one", subject.tokens);
  if (const OptimizerState state = subject.request.config.optimizer.state;
      state != OptimizerState::kFp32)
    say("moments in {} (optimizer.state)\n", name_of(state));
  for (const std::string& source : subject.rates.sources) say("  {}\n", source);
  if (fits) {
    print_pools(own, subject);
    print_step(own, subject);
    if (subject.request.micro_batches > 1)
      say("{}\n", describe(subject.orders, subject.request.order));
  } else {
    say("this config does not fit: {}\n", own.obstacle);
  }
  if (fits && !trains) say("\nhere, sluice train would refuse this: {}\n", subject.obstacle_here);
  print_alternatives(all);
  if (fits) print_quicker(all, subject.request.config);
  if (findings.free_tokens)
    say("\nfrom {:.3g} tokens per step and rank on, computation hides everything else to within 5 "
        "%\n",
        *findings.free_tokens);
  if (const auto steps = steps_of_life(subject, own))
    say("the drives' {:.4g} TB last for {:.3g} steps, {:.3g} days of this\n",
        subject.sharing_ranks * *subject.rated_bytes * 1e-12, *steps,
        *steps * own.step.step_s / 86400);
  if (options.stages) say("{}", planned_stages(subject.request));
  if (options.matrix)
    say("\nby ZeRO stage and offload, a rank has in use at most:\n{}",
        matrix_table(findings.matrix));
  if (options.as_deepspeed) print_deepspeed(options, subject, own);
  if (fits && options.ranks > 1) print_links(own);
}

void write_plan(const PlanOptions& options, const PlanSubject& subject,
                const std::vector<PlannedPlacement>& all, const PlanFindings& findings,
                OutputFile& output) {
  nlohmann::ordered_json root = {
      {"parameters", subject.parameters},
      {"active_parameters", subject.active_parameters},
      {"optimizer_state", name_of(subject.request.config.optimizer.state)},
      {"ranks", options.ranks},
      {"tokens", subject.tokens},
      {"free_from_tokens",
       findings.free_tokens ? nlohmann::ordered_json(*findings.free_tokens) : nullptr},
      {"steps_of_drive_life", nullptr},
      {"flops_per_s", nullptr},
      {"mfu", nullptr},
      {"order", name_of(subject.request.order)},
      {"activation_bytes", subject.activation_bytes},
      {"obstacle_here", subject.obstacle_here},
      {"placements", nlohmann::ordered_json::array()}};
  if (const auto steps = steps_of_life(subject, all.front())) root["steps_of_drive_life"] = *steps;
  if (all.front().obstacle.empty()) {
    root["flops_per_s"] = subject.model_flops / all.front().step.step_s;
    if (const auto mfu = mfu_of(subject, all.front())) root["mfu"] = *mfu;
  }
  for (const PlannedPlacement& planned : all) root["placements"].push_back(json_of(planned));
  if (options.stages) {
    for (const StageMemory& stage : memory_by_stage(subject.request))
      root["stages"].push_back(json_of(stage));
  }
  if (options.matrix) root["matrix"] = matrix_json(findings.matrix);
  if (options.as_deepspeed) {
    for (const DeepspeedEstimate& row : deepspeed_estimates(
             deepspeed_subject(subject.request.model, options.ranks, options.nodes.value_or(1))))
      root["deepspeed"].push_back(
          {{"options", row.options()}, {"cpu_bytes", row.cpu_bytes}, {"gpu_bytes", row.gpu_bytes}});
  }
  write_whole(output, json_text(root) + "\n");
}

}  // namespace sluice
