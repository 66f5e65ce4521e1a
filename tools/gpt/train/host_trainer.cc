#include "tools/gpt/train/host_trainer.h"

#include "base/topology.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/stream_guard.h"

namespace sluice {
gpt::BatchShape batch_shape(const TrainConfig& config) {
  return {.batch = config.sequences, .sequence = config.model.context};
}

gpt::GptComputeOptions compute_options(const TrainConfig& config) {
  return {.threads = granted_threads(config.engine.threads),
          .precision = {.parameters = config.engine.precision.parameters,
                        .gradients = config.engine.precision.gradients},
          .checkpoints = checkpoints_of(config),
          .micro_batches = micro_batches_at_once(config),
          .matmul = gpt::choose_matmul(config.matmul, config.engine.precision.parameters)};
}

HostTrainer::HostTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine,
                         HostDevice& device)
    : config_(config),
      dataset_(dataset),
      engine_(engine),
      device_(device),
      model_(validated(training_model(config))),
      at_once_(micro_batches_at_once(config)),
      compute_(config.model, batch_shape(config), compute_options(config)),
      stream_(device, "compute") {}

HostTrainer::ParameterList HostTrainer::parameters_of(const Lease& lease) const {
  ParameterList list;
  for (std::size_t tensor = 0; tensor < model_.units[index_of(lease.unit())].tensors.size();
       ++tensor)
    list.push_back(lease.parameter(tensor));
  return list;
}

HostTrainer::GradientList HostTrainer::gradients_of(const Lease& lease) const {
  GradientList list;
  for (std::size_t tensor = 0; tensor < model_.units[index_of(lease.unit())].tensors.size();
       ++tensor)
    list.push_back(lease.gradient(tensor));
  return list;
}

template <class Walk>
HostTrainer::HeldBoundaries HostTrainer::boundaries_of(Walk& walk, std::uint32_t forward_use,
                                                       std::uint32_t micro_batch, Pass pass) {
  HeldBoundaries held;
  held.boundaries.micro_batch = slot_of(micro_batch);
  if (config_.engine.activations.home == ActivationHome::kKeep) return held;
  held.leases = take_boundaries(walk,
                                {.forward_use = forward_use,
                                 .use_count = compute_.use_count(),
                                 .micro_batch = micro_batch,
                                 .pass = pass},
                                stream_);
  const auto floats = [](std::byte* data) { return reinterpret_cast<float*>(data); };
  held.boundaries.input = floats(held.leases.input);
  held.boundaries.output = floats(held.leases.output);
  held.boundaries.output_gradient = floats(held.leases.output_gradient);
  held.boundaries.input_gradient = floats(held.leases.input_gradient);
  return held;
}

void HostTrainer::forward(Step& step, const Use& use, double& loss) {
  if (use.index == 0) {
    device_.launch(stream_.id(), [this, use] {
      // Ranks take turns: together they see what one rank sees with as many more micro-batches.
      const TokenBatch batch = dataset_.training_batch(
          use.step, use.micro_batch * engine_.rank_count() + engine_.rank());
      compute_.start_training(batch.tokens, batch.targets, slot_of(use.micro_batch));
    });
  }
  const Lease lease = step.acquire(model_.forward_order[use.index], Pass::kForward, stream_);
  const HeldBoundaries held = boundaries_of(step, use.index, use.micro_batch, Pass::kForward);
  device_.launch(stream_.id(),
                 [this, use, parameters = parameters_of(lease), boundaries = held.boundaries] {
                   compute_.forward(use.index, parameters, boundaries);
                 });
  if (use.index + 1 == model_.forward_order.size())
    device_.launch(stream_.id(), [this, &loss] { loss += compute_.loss(); });
}

void HostTrainer::backward(Step& step, const Use& use) {
  const Lease lease = step.acquire(model_.backward_order[use.index], Pass::kBackward, stream_);
  const auto forward_use = static_cast<std::uint32_t>(model_.forward_order.size()) - 1 - use.index;
  const HeldBoundaries held = boundaries_of(step, forward_use, use.micro_batch, Pass::kBackward);
  device_.launch(stream_.id(), [this, use, parameters = parameters_of(lease),
                                gradients = gradients_of(lease), boundaries = held.boundaries] {
    compute_.backward(use.index, parameters, gradients, boundaries);
  });
}

TrainedStep HostTrainer::train_step(std::uint64_t step_number) {
  TrainedStep trained;
  const StreamGuard guard(device_, stream_);
  const MicroBatchOrder order = config_.order.value_or(MicroBatchOrder::kHorizontal);
  Step step = engine_.begin_step({.learning_rate = learning_rate_at(config_, step_number),
                                  .micro_batches = config_.micro_batches,
                                  .order = order});
  device_.launch(stream_.id(), [this, scale = static_cast<float>(step.loss_scale())] {
    compute_.set_loss_scale(scale);
  });
  const auto uses = static_cast<std::uint32_t>(model_.forward_order.size());
  for (std::uint32_t first = 0; first < config_.micro_batches; first += at_once_) {
    const auto for_each_use = [&](const auto& body) {
      for (std::uint32_t use = 0; use < uses; ++use) {
        for (std::uint32_t i = 0; i < at_once_; ++i)
          body(Use{.index = use, .micro_batch = first + i, .step = step_number});
      }
    };
    for_each_use([&](const Use& use) { forward(step, use, trained.loss); });
    for_each_use([&](const Use& use) { backward(step, use); });
  }
  trained.report = step.finish(finish_options_);
  trained.loss /= config_.micro_batches;
  return trained;
}

std::optional<double> HostTrainer::evaluate_until(const StopRequest& stop,
                                                  std::span<const TokenBatch> batches) {
  const auto forward = [&](const Lease& lease, std::uint32_t use, std::span<const TokenBatch> group,
                           std::vector<double>& losses) {
    device_.launch(stream_.id(), [this, &stop, use, parameters = parameters_of(lease), group,
                                  &losses] { evaluate_use(stop, use, parameters, group, losses); });
  };
  return mean_loss({engine_, device_, stream_, model_.forward_order, compute_.evaluation_batches()},
                   stop, batches, forward);
}

// On the stream. The time of a whole group would be long after a request to stop.
void HostTrainer::evaluate_use(const StopRequest& stop, std::uint32_t use,
                               const ParameterList& parameters, std::span<const TokenBatch> group,
                               std::vector<double>& losses) {
  for (std::uint32_t i = 0; i < group.size() && !stop.is_asked(); ++i) {
    if (use == 0) compute_.start_evaluation(group[i].tokens, group[i].targets, i);
    compute_.forward(use, parameters, {.micro_batch = i});
    if (use + 1 == compute_.use_count()) losses.push_back(compute_.loss());
  }
}

std::span<const float> HostTrainer::next_logits(std::span<const std::uint32_t> tokens) {
  const StreamGuard guard(device_, stream_);
  Inference inference = engine_.begin_inference();
  device_.launch(stream_.id(), [this, tokens] { compute_.start_generation(tokens); });
  for (std::uint32_t use = 0; use < model_.forward_order.size(); ++use) {
    const Lease lease = inference.acquire(model_.forward_order[use], stream_);
    const HeldBoundaries held = boundaries_of(inference, use, 0, Pass::kInference);
    device_.launch(stream_.id(),
                   [this, use, parameters = parameters_of(lease), boundaries = held.boundaries] {
                     compute_.forward(use, parameters, boundaries);
                   });
  }
  device_.synchronize(stream_.id());
  return compute_.last_logits();
}

}  // namespace sluice
