#include "tools/tune/run_model.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/planner/plan_evaluation.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/report/config_changes.h"

namespace sluice {
namespace {

// Transfers and updates that computation hides still take memory's rate, and on the host its cores.
// The model does not know how much, so they count only where steps are otherwise equal.
constexpr double kHiddenShare = 0.01;
constexpr double kHiddenShareOfHost = 0.1;

// The times measured with `measured`, for the batch and the activations of `config`: computation
// grows with the sequences, and a use that computes its activations again does its forward twice.
void scale_units(const TrainConfig& measured, const TrainConfig& config, Rates& rates) {
  const double scale = static_cast<double>(config.sequences) / measured.sequences;
  const bool did = measured.engine.activations.home != ActivationHome::kKeep;
  const bool does = config.engine.activations.home != ActivationHome::kKeep;
  for (UnitTime& unit : rates.units) {
    const double again_s = (does ? unit.forward_s : 0) - (did ? unit.forward_s : 0);
    unit = {.forward_s = scale * unit.forward_s,
            .backward_s = scale * std::max(0.0, unit.backward_s + again_s)};
  }
}

PlanRates stated_rates(const TrainConfig& config, const MachineCalibration& machine,
                       const std::string& gpu_file) {
  PlanRateOptions options;
  options.adam = machine.adam_parameters_per_second;
  options.gpu_file = gpu_file;
  options.is_on_host = computes_on_host(config);
  return plan_rates(options, state_format(config.engine));
}

}  // namespace

RunModel::RunModel(const ConfigDocument& given, MachineCalibration machine,
                   const std::string& gpu_file)
    : text_(config_text_of(given)),
      given_(train_config(given)),
      machine_(std::move(machine)),
      is_on_host_(computes_on_host(given_)),
      stated_(stated_rates(given_, machine_, gpu_file)),
      room_(memory_room()) {
  validate(given_.engine);
}

void RunModel::learn(const Trial& trial, const TrainConfig& config) {
  measured_ = trial.rates;
  measured_config_ = config;
  flops_ = 0;
  // A budget that the config names says nothing about the device's memory.
  if (!is_on_host_ && !config.engine.memory.device_bytes) device_bytes_ = trial.device_budget_bytes;
}

TrainConfig RunModel::config_with(const TuneSettings& settings) const {
  return train_config(ConfigDocument(text_with(settings), "the changed config"));
}

std::string RunModel::text_with(const TuneSettings& settings) const {
  return changed_config_text(text_, settings);
}

Rates RunModel::rates_for(const TrainConfig& config) const {
  Rates rates = stated_.rates;
  const auto take = [](double measured, double& rate) {
    if (measured > 0) rate = measured;
  };
  take(measured_.up_bytes_per_second, rates.up_bytes_per_second);
  take(measured_.down_bytes_per_second, rates.down_bytes_per_second);
  take(measured_.adam_parameters_per_second, rates.adam_parameters_per_second);
  take(measured_.norm_parameters_per_second, rates.norm_parameters_per_second);
  if (flops_ != 0) return rates;
  rates.units = measured_.units;
  scale_units(measured_config_, config, rates);
  return rates;
}

TunePrediction RunModel::predict(const TuneSettings& settings) const {
  try {
    return predicted(config_with(settings));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kConfig && error.code() != ErrorCode::kOutOfMemory) throw;
    return {.obstacle = error.what()};
  }
}

TunePrediction RunModel::predicted(TrainConfig config) const {
  validate(config.engine);
  const std::uint64_t activation_bytes = kept_activation_bytes(config, is_on_host_);
  HostMemory host = share_of_host(is_on_host_, activation_bytes, /*ranks=*/1);
  host.room = room_;
  settle_budgets(config.engine.memory, host);
  PlanRequest request;
  request.machine = machine_of(host, 1);
  if (is_on_host_) request.machine.device_bytes = host_device_bytes(config.engine);
  if (device_bytes_ != 0) request.machine.device_bytes = device_bytes_;
  resolve_order(config, request.machine);
  request.config = config.engine;
  request.model = training_model(config, is_on_host_);
  request.micro_batches = config.micro_batches;
  request.order = *config.order;
  const double tokens = static_cast<double>(config.sequences) * config.model.context;
  for (const double flops : gpt::forward_flops_per_token(config.model))
    request.forward_flops.push_back(flops * tokens);
  request.flops = flops_;
  request.rates = rates_for(config);
  const PlanEvaluation evaluation(request);
  const PlannedPlacement planned = evaluation.place("config", config.engine.placement);
  if (!planned.obstacle.empty()) return {.obstacle = planned.obstacle};
  host.device_pool_bytes = is_on_host_ ? planned.placement.device_bytes() : 0;
  host.host_pool_bytes = planned.placement.host_bytes();
  if (config.engine.memory.check == RoomCheck::kError)
    if (const auto shortage = shortage_of(host)) return {.obstacle = *shortage};
  const std::uint64_t request_bytes =
      static_cast<std::uint64_t>(static_cast<double>(evaluation.layout().block_elements()) *
                                 state_format(config.engine).state_bytes_per_element());
  // Lanes bound what is in flight, too; the simulation sees that by the latency.
  machine_.set_storage_rates_for(request_bytes, config.engine.storage.queue_depth, request.rates);
  const StepCost cost = evaluation.step_of(planned.placement, planned.policy, evaluation.rates());
  double hidden_s = 0;
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    const auto resource = static_cast<Resource>(i);
    // All work on host memory occupies another resource, too.
    if (resource != Resource::kCompute && resource != Resource::kHostMemory)
      hidden_s += cost.busy_s[i];
  }
  const double share = is_on_host_ ? kHiddenShareOfHost : kHiddenShare;
  return {.step_s = cost.step_s,
          .rank_s = cost.step_s + share * hidden_s,
          .obstacle = {},
          .binds = std::string(name_of(cost.scarcest()))};
}

}  // namespace sluice
