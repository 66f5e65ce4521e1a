#include "tools/tune/tune_axes.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "engine/config/config_schema_check.h"
#include "tools/gpt/train/compute_device.h"

namespace sluice {
namespace {

std::string quoted(std::string_view text) {
  return fmt::format("\"{}\"", text);
}

// The homes that plans compare, each under the given budgets and under the machine's.
TuneAxis homes_axis() {
  constexpr std::array<std::array<const char*, 2>, 5> kHomes{{{"auto", "auto"},
                                                              {"host", "host"},
                                                              {"device", "host"},
                                                              {"auto", "device"},
                                                              {"nvme", "nvme"}}};
  TuneAxis axis{.name = "homes of the state", .choices = {{}}};
  for (const auto& [parameters, optimizer] : kHomes) {
    const TuneSettings homes = {{"placement.parameters", quoted(parameters)},
                                {"placement.optimizer", quoted(optimizer)},
                                {"placement.gradients", quoted("auto")}};
    TuneSettings with_budgets = homes;
    with_budgets["memory.device"] = with_budgets["memory.host"] = quoted("auto");
    axis.choices.push_back(with_budgets);
    axis.choices.push_back(homes);
  }
  for (const char* budget : {"memory.device", "memory.host"})
    axis.choices.push_back({{budget, quoted("auto")}});
  return axis;
}

// The numbers of sequences in a micro-batch that divide the step's, near the given one.
std::vector<std::uint32_t> divisions(const TrainConfig& given) {
  constexpr std::uint64_t kFactorMax = 8;
  const std::uint64_t all = std::uint64_t{given.sequences} * given.micro_batches;
  std::vector<std::uint32_t> divisors;
  const std::uint64_t most = std::min(all, kFactorMax * given.sequences);
  for (std::uint64_t sequences = 1; sequences <= most; ++sequences) {
    const bool is_near = sequences * kFactorMax >= given.sequences;
    if (all % sequences == 0 && is_near && all / sequences <= UINT32_MAX)
      divisors.push_back(static_cast<std::uint32_t>(sequences));
  }
  return divisors;
}

TuneAxis batch_axis(const TrainConfig& given) {
  TuneAxis axis{.name = "batch and activations", .choices = {{}}};
  const std::uint64_t all = std::uint64_t{given.sequences} * given.micro_batches;
  const auto add = [&](ActivationHome home, std::uint32_t sequences, const char* order) {
    axis.choices.push_back({{"activations", quoted(name_of(home))},
                            {"batch.sequences", std::to_string(sequences)},
                            {"batch.micro_batches", std::to_string(all / sequences)}});
    // Where backward uses a unit twice, another order gives other bits.
    if (!given.model.tied_head) axis.choices.back()["batch.order"] = quoted(order);
  };
  add(given.engine.activations.home, given.sequences, "auto");
  for (const ActivationHome home : {ActivationHome::kKeep, ActivationHome::kRecompute,
                                    ActivationHome::kHost, ActivationHome::kNvme}) {
    for (const std::uint32_t sequences : divisions(given)) {
      add(home, sequences, "horizontal");
      if (!given.model.tied_head && home != ActivationHome::kKeep && sequences != all)
        add(home, sequences, "vertical");
    }
  }
  return axis;
}

TuneAxis policy_axis(const TrainConfig& given) {
  TuneAxis axis{.name = "policy of updates", .choices = {{}}};
  const Config::Optimizer& optimizer = given.engine.optimizer;
  std::vector<OverlapPolicy> policies = {OverlapPolicy::kAuto, OverlapPolicy::kDeferred,
                                         OverlapPolicy::kSpeculative, OverlapPolicy::kSerial};
  if (optimizer.clip_norm == 0 && optimizer.non_finite == NonFinitePolicy::kStop &&
      !given.engine.precision.scale_moves())
    policies.push_back(OverlapPolicy::kEager);
  for (const OverlapPolicy policy : policies)
    axis.choices.push_back({{"optimizer.overlap", quoted(name_of(policy))}});
  return axis;
}

// The GPU is the other processor for updates.
TuneAxis processor_axis() {
  TuneAxis axis{.name = "processor of updates", .choices = {{}}};
  for (const UpdateProcessor processor : {UpdateProcessor::kCpu, UpdateProcessor::kDevice})
    axis.choices.push_back({{"optimizer.update_on", quoted(name_of(processor))}});
  return axis;
}

TuneAxis number_axis(const char* name, const char* key, const std::vector<std::string>& values) {
  TuneAxis axis{.name = name, .choices = {{}}, .is_fine = true};
  for (const std::string& value : values) axis.choices.push_back({{key, value}});
  return axis;
}

TuneAxis weights_axis(const MachineCalibration& machine) {
  TuneAxis axis{.name = "shares of the paths", .choices = {{}}, .is_fine = true};
  std::vector<std::uint64_t> megabytes;
  for (const double rate : machine.path_rates)
    megabytes.push_back(std::max<std::uint64_t>(1, static_cast<std::uint64_t>(rate * 1e-6)));
  axis.choices.push_back({{"storage.weights", fmt::format("[{}]", fmt::join(megabytes, ", "))},
                          {"storage.calibration", quoted("")}});
  axis.choices.push_back({{"storage.weights", "[]"}, {"storage.calibration", quoted("")}});
  return axis;
}

// Small blocks divide a small model finely enough for its buffers and homes; of a large one they
// only make requests slow.
TuneAxis blocks_axis(const TrainConfig& given) {
  constexpr std::uint64_t kSmallBlock = 16 << 10;
  constexpr std::uint64_t kSmallBlocksMax = 4096;
  std::vector<std::string> sizes = {"null", "65536", "262144", "1048576", "4194304"};
  if (validated(training_model(given)).element_count() <= kSmallBlock * kSmallBlocksMax)
    sizes.insert(sizes.begin() + 1, std::to_string(kSmallBlock));
  TuneAxis axis = number_axis("block size", "storage.block_elements", sizes);
  axis.is_fine = false;
  axis.is_unsure =
      true;  // of a block, the model knows the bytes, and not what it costs beside them
  return axis;
}

bool is_under(const std::string& key, const std::string& section) {
  return key == section || key.starts_with(section + ".");
}

void check_kept(const std::vector<std::string>& kept) {
  const std::vector<std::string> keys = config_keys();
  for (const std::string& section : kept) {
    if (std::ranges::none_of(keys, [&](const std::string& key) { return is_under(key, section); }))
      throw Error(ErrorCode::kConfig,
                  fmt::format("tune: --keep {}: a config has no such key or section{}", section,
                              nearest_key_hint(section, "")));
  }
}

}  // namespace

std::vector<TuneAxis> tune_axes(const ConfigDocument& document, const TrainConfig& given,
                                const MachineCalibration& machine,
                                const std::vector<std::string>& kept) {
  check_kept(kept);
  std::vector<TuneAxis> axes = {homes_axis(), batch_axis(given), policy_axis(given)};
  if (!computes_on_host(given)) axes.push_back(processor_axis());
  // The files of a durable store have their blocks already.
  if (given.engine.storage.state.name.empty()) {
    axes.push_back(blocks_axis(given));
    if (machine.path_rates.size() > 1) axes.push_back(weights_axis(machine));
  }
  axes.push_back(number_axis("lanes", "optimizer.lanes", {"null", "2", "4", "8", "16", "32"}));
  axes.push_back(number_axis("queue depth", "storage.queue_depth", {"32", "8", "128"}));
  const auto stays = [&](const auto& setting) {
    const auto& [key, value] = setting;
    // The two together are the batch of a step.
    const bool is_batch = key == "batch.sequences" || key == "batch.micro_batches";
    return std::ranges::any_of(kept,
                               [&](const std::string& section) {
                                 return is_under(key, section) ||
                                        (is_batch && (section == "batch.sequences" ||
                                                      section == "batch.micro_batches"));
                               }) ||
           nlohmann::json::parse(value) == nlohmann::json::parse(document.json_of(key));
  };
  for (TuneAxis& axis : axes) {
    std::vector<TuneSettings> choices = {{}};
    for (TuneSettings& choice : axis.choices) {
      std::erase_if(choice, stays);
      if (std::ranges::find(choices, choice) == choices.end()) choices.push_back(std::move(choice));
    }
    axis.choices = std::move(choices);
  }
  std::erase_if(axes, [](const TuneAxis& axis) { return axis.choices.size() == 1; });
  return axes;
}

bool divides_batch(const TuneSettings& settings) {
  return settings.contains("batch.sequences");
}

}  // namespace sluice
