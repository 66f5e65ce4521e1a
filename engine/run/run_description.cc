#include "engine/run/run_description.h"

#include <fmt/format.h>

namespace sluice {

std::string describe_run(const Config& config, const ModelSpec& model, const Layout& layout,
                       const Placement& placement, std::uint64_t device_bytes,
                       std::uint64_t scheduled_step) {
  std::string text = fmt::format("stage {}, group {}, device {}, window {}, leases {}, step {}\n",
                                 config.sharding.stage, config.sharding.group_ranks,
                                 device_bytes, placement.window_bytes,
                                 model.concurrent_leases, scheduled_step);
  text += fmt::format("{} {} {} {} {} {} {} {} {} {} {}\n", name_of(config.precision.parameters),
                      name_of(config.precision.gradients), name_of(config.optimizer.kind),
                      config.optimizer.adam.beta1, config.optimizer.adam.beta2,
                      config.optimizer.adam.epsilon, config.optimizer.adam.weight_decay,
                      config.optimizer.momentum, config.optimizer.clip_norm,
                      config.optimizer.clip_epsilon,
                      static_cast<int>(config.optimizer.non_finite));
  const LossScaleOptions& scale = config.precision.loss_scale;
  text +=
      fmt::format("scale {} {} {} {} {} {}\n", scale.static_scale, scale.initial_scale_power,
                  scale.window, scale.hysteresis, scale.consecutive_hysteresis, scale.minimum);
  if (const Config::Storage::State& state = config.storage.state; !state.name.empty())
    text += fmt::format("store {}, commit every {}\n", state.name, state.commit_every);
  for (const Config::Optimizer::Group& group : config.optimizer.groups)
    text += fmt::format("{} {} {}\n", fmt::join(group.tensors, " "), group.learning_rate_factor,
                        group.weight_decay.value_or(-1));
  for (const UnitSpec& unit : model.units) {
    text += fmt::format("unit {}\n", unit.name);
    for (const TensorSpec& tensor : unit.tensors)
      text += fmt::format("{} {} {}\n", tensor.name, fmt::join(tensor.shape, "x"),
                          static_cast<int>(tensor.weight_decay));
  }
  for (const auto* order : {&model.forward_order, &model.backward_order})
    for (const UnitId unit : *order) text += fmt::format("{} ", index_of(unit));
  for (const UnitPlace& unit : layout.units())
    text += placement.unit_is_on_device(unit) ? "device " : "window ";
  return text;
}

}  // namespace sluice
