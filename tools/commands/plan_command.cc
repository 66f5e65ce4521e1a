#include "tools/commands/plan_command.h"

#include <algorithm>
#include <future>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/at_once.h"
#include "base/topology.h"
#include "engine/planner/compute_factor.h"
#include "engine/planner/order_choice.h"
#include "engine/planner/planner.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/config_inputs.h"
#include "tools/commands/plan_model.h"
#include "tools/commands/plan_plot.h"
#include "tools/commands/plan_report.h"
#include "tools/commands/plan_room.h"
#include "tools/commands/plan_subject.h"
#include "tools/deepspeed/config_source.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/train_ranks.h"
#include "tools/report/config_changes.h"
#include "tools/report/machine_presets.h"

namespace sluice {
namespace {

[[noreturn]] void refuse_plan(const std::string& message) {
  throw Error(ErrorCode::kConfig, "plan: " + message);
}

// A file of its own, or DeepSpeed's, or none: all defaults.
ConfigDocument document_of(const PlanOptions& options) {
  DeepspeedValues values = options.deepspeed;
  values.ranks = options.ranks;
  if (!options.config_file.empty())
    return read_config_source(options.config_file, values, options.assignments).document;
  refuse_deepspeed_values(values, "an empty config");
  ConfigDocument document("{}", "no config");
  for (const std::string& assignment : options.assignments) document.set(assignment);
  return document;
}

// Says which --tokens leave enough of the GPU for the pools. `other` helps, too.
std::string token_remedy(const GpuPreset& gpu, const PlanSubject& subject,
                         const ModelOfTokens& model_of, const PlanOptions& options,
                         const char* other) {
  const auto most = most_tokens(subject, model_of, gpu.memory_bytes - kGpuContextBytes,
                                options.sequence.value_or(1), options.ranks);
  if (!most) return fmt::format("give fewer --tokens, or {}", other);
  if (*most > 0) return fmt::format("give --tokens {:.0f} or fewer, or {}", *most, other);
  return "no --tokens are few enough beside its pools: give a larger --gpu" + subject.remedy;
}

// The GPU memory that is left beside the activations.
std::uint64_t device_budget(const GpuPreset& gpu, const PlanSubject& subject,
                            const ModelOfTokens& model_of, const PlanOptions& options) {
  const std::uint64_t beside_bytes = subject.activation_bytes + kGpuContextBytes;
  if (beside_bytes < gpu.memory_bytes) return gpu.memory_bytes - beside_bytes;
  const PlanRequest& request = subject.request;
  const bool is_kept = request.config.activations.home == ActivationHome::kKeep;
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format("does not fit: the activations of {:.0f} tokens take {}, the driver {}, and a {} "
                  "has {}; {}{}",
                  subject.tokens / request.micro_batches, format_bytes(subject.activation_bytes),
                  format_bytes(kGpuContextBytes), gpu.name, format_bytes(gpu.memory_bytes),
                  token_remedy(gpu, subject, model_of, options,
                               is_kept ? "--set activations=recompute" : "a larger --gpu"),
                  options.tokens ? ""
                                 : fmt::format(" (without --tokens, a step has {:.0f}: that many "
                                               "sequences as batch.sequences and "
                                               "batch.micro_batches say)",
                                               subject.tokens)));
}

// A plan has memory for each block, and takes time for it.
constexpr std::uint64_t kPlannedBlocksMax = std::uint64_t{1} << 24;
constexpr std::uint64_t kBlockElementsDefault = std::uint64_t{1} << 20;  // of large models

void check_blocks(const ModelSpec& model, const PlanOptions& options, const Config& engine) {
  const std::uint64_t block_elements =
      engine.storage.block_elements.value_or(kBlockElementsDefault);
  std::uint64_t blocks = 0;
  for (const UnitSpec& unit : model.units) {
    std::uint64_t elements = 0;
    for (const TensorSpec& tensor : unit.tensors) elements += tensor.element_count();
    blocks += div_ceil(div_ceil(elements, options.ranks), block_elements);
  }
  if (blocks <= kPlannedBlocksMax) return;
  refuse_plan(fmt::format(
      "{} blocks of {} elements on each rank are more than the {} of the largest plan; give more "
      "--ranks (now {}) or larger blocks, such as --set storage.block_elements={}",
      blocks, block_elements, kPlannedBlocksMax, options.ranks,
      std::min<std::uint64_t>(256 << 20, 16 * block_elements)));
}

// Without a config, this host is no more than where the plan is made.
Error in_words_of_a_plan(const Error& error) {
  return in_words_of(
      {{"for sluice train batch.sequences or model.context", "--tokens", true},
       {"find more memory",
        "plan for another machine: --gpu NAME, or --set memory.device=SIZE and --host-memory SIZE",
        true}},
      error);
}

// Settles the budgets that are not given.
void settle(PlanSubject& subject, const ModelOfTokens& model_of, const PlanOptions& options,
            Config& engine) {
  if (!options.gpu.empty()) {
    const GpuPreset& gpu = gpu_preset(options.gpu);
    const std::uint64_t budget_bytes = device_budget(gpu, subject, model_of, options);
    if (engine.memory.device_bytes.value_or(0) > budget_bytes)
      throw Error(
          ErrorCode::kOutOfMemory,
          fmt::format("does not fit: memory.device is {}, the activations of {:.0f} tokens "
                      "take {}, the driver {}, and a {} has {}; set memory.device to at "
                      "most {}, or give fewer --tokens",
                      format_bytes(*engine.memory.device_bytes),
                      subject.tokens / subject.request.micro_batches,
                      format_bytes(subject.activation_bytes), format_bytes(kGpuContextBytes),
                      gpu.name, format_bytes(gpu.memory_bytes), format_bytes(budget_bytes)));
    if (!engine.memory.device_bytes) {
      engine.memory.device_bytes = budget_bytes;
      subject.origin_of_device_bytes = fmt::format(
          "memory.device is what a {} leaves beside the driver and the activations of {:.0f} "
          "tokens",
          gpu.name, subject.tokens / subject.request.micro_batches);
      subject.remedy_of_device_bytes =
          ": " + token_remedy(gpu, subject, model_of, options, "a larger --gpu");
    }
  }
  if (!options.host_memory.empty()) {
    const std::uint64_t bytes = parse_size(options.host_memory);
    if (bytes < 1_MiB)
      refuse_plan(
          fmt::format("--host-memory {} is below 1 MiB; write the size with its unit, such "
                      "as 64G",
                      options.host_memory));
    engine.memory.host_bytes = bytes / subject.sharing_ranks;
  }
  subject.host = share_of_host(subject.is_on_host, subject.activation_bytes,
                               options.nodes ? subject.sharing_ranks : options.ranks);
  try {
    settle_budgets(engine.memory, subject.host);
  } catch (const Error& error) {
    if (options.config_file.empty()) throw in_words_of_a_plan(error);
    throw;
  }
}

PlanRateOptions rates_of(const PlanOptions& options, const PlanSubject& subject) {
  PlanRateOptions rates = options.rates;
  rates.sharing_ranks = subject.sharing_ranks;
  rates.is_on_host = subject.is_on_host;
  rates.host_threads = subject.host_threads;
  rates.drives = options.drive;
  if (!options.gpu.empty()) rates.sheet_flops = kReachedShare * gpu_preset(options.gpu).flops;
  return rates;
}

// The space and the life of the drives, in this rank's share.
void set_drives(const PlanOptions& options, PlanSubject& subject) {
  const double share = 1 / static_cast<double>(subject.sharing_ranks);
  if (!options.drive.empty()) {
    const DriveSet set = drive_set(options.drive);
    subject.drive_bytes = static_cast<std::uint64_t>(set.count * set.drive.size_bytes * share);
    subject.rated_bytes = set.count * set.drive.written_bytes * share;
  }
  if (!options.drive_space.empty())
    subject.drive_bytes = parse_size(options.drive_space) / subject.sharing_ranks;
  if (!options.bytes_written_rating.empty())
    subject.rated_bytes = static_cast<double>(parse_size(options.bytes_written_rating)) * share;
}

// "node" and "nodes" as the number of ranks on a node, which --nodes tells.
void settle_nodes(const PlanOptions& options, std::uint32_t node_ranks,
                  Config::Sharding& sharding) {
  if (options.ranks == 1) return;
  if (sharding.reduction == RankReduction::kNodes && sharding.node_ranks == 0) {
    if (!options.nodes)
      throw Error(ErrorCode::kConfig,
                  "sharding.reduction is \"nodes\", and a plan does not know how many ranks a node "
                  "has; say with --nodes how many nodes there are, or set sharding.node_ranks");
    sharding.node_ranks = node_ranks;
  }
  if (!sharding.group_is_node) return;
  if (!options.nodes)
    throw Error(ErrorCode::kConfig,
                "sharding.group is \"node\", and a plan does not know how many ranks a node has; "
                "say with --nodes how many nodes there are, or set sharding.group to the number of "
                "a node's ranks");
  sharding.group_ranks = node_ranks;
  sharding.group_is_node = false;
}

// An option that changes nothing is a mistake, and the plan would hide it.
void check_effects(const PlanOptions& options, const Config& engine) {
  if (!options.rates.link.empty() && options.ranks == 1)
    refuse_plan(
        fmt::format("--link-rate {} has no effect on one rank, which has no link to others; give "
                    "--ranks, or leave --link-rate out",
                    options.rates.link));
  if (options.rates.flush_ms && engine.storage.state.name.empty())
    refuse_plan(fmt::format(
        "--flush-ms {:g} has no effect without a durable store, since only a commit flushes; give "
        "--set storage.state.name=NAME, or leave --flush-ms out",
        *options.rates.flush_ms));
}

// The config of this plan, with the budgets that the plan has come to.
std::string planned_config(const ConfigDocument& document, const Config& engine) {
  const auto bytes = [](const std::optional<std::uint64_t>& size_bytes) {
    return size_bytes ? fmt::format("\"{}\"", *size_bytes) : "null";
  };
  return changed_config_text(config_text_of(document),
                             {{"memory.device", bytes(engine.memory.device_bytes)},
                              {"memory.host", bytes(engine.memory.host_bytes)}});
}

PlanSubject subject_of(const PlanOptions& options, const ConfigDocument& document) {
  TrainConfig config = train_config(document);
  check_effects(options, config.engine);
  PlanSubject subject;
  if (options.nodes) subject.sharing_ranks = options.ranks / *options.nodes;
  set_drives(options, subject);
  if (options.gpu.empty()) check_gpu_config(config);
  if (options.ranks > 1) {
    check_ranks_config(config);
    share_host_among(options.ranks, config);
  }
  validate(config.engine);
  subject.is_on_host = options.gpu.empty() && computes_on_host(config);
  // A config alone is planned for this machine, and sizes of a model for one with a GPU.
  const bool is_config_alone =
      !options.config_file.empty() && options.model.empty() && !options.parameters;
  if (subject.is_on_host && is_config_alone)
    subject.host_threads = std::max(1u, granted_threads(config.engine.threads) / options.ranks);
  subject.rates = plan_rates(rates_of(options, subject), state_format(config.engine));
  subject.is_of_this_machine =
      options.gpu.empty() && options.host_memory.empty() && options.ranks == 1 && is_config_alone;
  PlanModel model = plan_model(config, options, subject.is_on_host);
  if (!(model.tokens > 0)) refuse_plan(fmt::format("--tokens {} is not positive", model.tokens));
  subject.tokens = model.tokens;
  subject.description = model.description;
  subject.activation_bytes = model.activation_bytes;
  check_blocks(model.spec, options, config.engine);
  if (options.parameters && options.layers == 1)
    subject.remedy = "; all parameters are one unit: --layers cuts them into units that take turns";
  PlanRequest& request = subject.request;
  request.config = config.engine;
  request.micro_batches = config.micro_batches;
  settle_nodes(options, subject.sharing_ranks, request.config.sharding);
  const auto model_of = [&](double tokens) {
    PlanOptions other = options;
    other.tokens = tokens;
    return plan_model(config, other, subject.is_on_host);
  };
  settle(subject, model_of, options, request.config);
  for (const UnitSpec& unit : model.spec.units) {
    for (const TensorSpec& tensor : unit.tensors)
      subject.parameters += static_cast<double>(tensor.element_count());
  }
  subject.active_parameters = model.active_parameters;
  if (!options.tensors_file.empty()) subject.tensors = tensors_json(model);
  request.model = std::move(model.spec);
  request.forward_flops = std::move(model.forward_flops);
  const ModelSpec valid = validated(request.model);
  for (const UnitId unit : valid.forward_order)
    subject.model_flops += 3 * request.forward_flops[index_of(unit)] * config.micro_batches;
  if (!options.gpu.empty()) subject.peak_flops = gpu_preset(options.gpu).flops;
  request.machine = machine_of(subject.host, options.ranks);
  request.machine.device_bytes = host_device_bytes(request.config);
  if (subject.drive_bytes) {
    request.machine.free_bytes = [bytes = *subject.drive_bytes](const std::string&) {
      return bytes;
    };
  } else if (!subject.is_of_this_machine) {
    request.machine.free_bytes = nullptr;  // this machine's drives say nothing about another's
  }
  subject.orders = plan_orders(request.config, valid, request.machine);
  request.order =
      config.order.value_or(better_order(subject.orders, valid, request.config, options.ranks));
  request.config.activations.order = request.order;
  request.rates = subject.rates.rates;
  request.flops = subject.rates.flops;
  request.run_each = for_each_at_once;
  return subject;
}

}  // namespace

int run_plan(const PlanOptions& options) {
  if (options.nodes && options.ranks % *options.nodes != 0)
    refuse_plan(
        fmt::format("--nodes {} does not divide --ranks {}; --ranks counts those of all nodes, the "
                    "same number on each",
                    *options.nodes, options.ranks));
  const ConfigDocument document = document_of(options);
  if (!options.output_file.empty()) (void)config_text_of(document);  // fails before the work
  PlanSubject subject = subject_of(options, document);
  OutputFiles outputs;
  add_config_inputs(outputs, options.config_file, document);
  outputs.add_input("--model", options.model);
  outputs.add_input("--io", options.rates.io_file);
  outputs.add_input("--adam", options.rates.adam_file);
  outputs.add_input("--gpu-rates", options.rates.gpu_file);
  OutputFile& output = outputs.add("--output", options.output_file);
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& tensors = outputs.add("--tensors", options.tensors_file);
  OutputFile& plot = outputs.add("--plot", options.plot_file);
  outputs.check();
  if (tensors.is_wanted()) write_whole(tensors, subject.tensors);
  std::optional<Progress> progress(std::in_place, "planning every place for the state");
  std::vector<PlannedPlacement> all = plan_alternatives(subject.request);
  check_room(subject, all);
  const PlannedPlacement& own = all.front();
  const bool fits = own.obstacle.empty();
  subject.obstacle_here = obstacle_here(subject, own);
  PlanFindings findings;
  if (fits) progress->set("looking for the computation that hides everything else");
  // Both simulate steps, and neither needs the other.
  auto factor = std::async(std::launch::async,
                           [&] { return compute_factor_that_hides(subject.request, own); });
  findings.verdict = plan_verdict(all, subject);
  if (const auto found = factor.get()) findings.free_tokens = *found * subject.tokens;
  std::optional<std::string> picture;
  if (plot.is_wanted()) {
    progress->set("planning under other budgets of host memory");
    picture = plan_plot(subject);
  }
  if (options.matrix) {
    progress->set("planning every ZeRO stage and offload");
    findings.matrix = matrix_of(subject);
  }
  progress.reset();
  print_plan(options, subject, all, findings);
  if (json.is_wanted()) write_plan(options, subject, all, findings, json);
  if (picture)
    write_whole(plot, *picture);
  else if (plot.is_wanted())
    warn("sluice: --plot: no budget of host memory lets this config fit, so there is no picture\n");
  if (output.is_wanted() && fits) {
    write_whole(output, planned_config(document, subject.request.config));
    say("{} is written: the config's keys, and the plan's budgets\n", output.path());
  } else if (output.is_wanted()) {
    warn("sluice: --output: the plan does not fit, so there is no config to write\n");
  }
  return fits && subject.obstacle_here.empty() ? kExitOk : kExitResource;
}

}  // namespace sluice
