#include "tools/trainer.h"

#include "base/topology.h"
#include "tools/gpt/gpt_model.h"
#include "tools/stream_guard.h"

namespace sluice {
namespace {

gpt::GptComputeOptions compute_options(const TrainConfig& config) {
  return {.threads = granted_threads(config.engine.threads),
          .precision = {.parameters = config.engine.precision.parameters,
                        .gradients = config.engine.precision.gradients}};
}

}  // namespace

Trainer::Trainer(const TrainConfig& config, const Dataset& dataset, Engine& engine,
                 HostDevice& device)
    : config_(config),
      dataset_(dataset),
      engine_(engine),
      device_(device),
      model_(validated(gpt::gpt_model_spec(config.model))),
      compute_(config.model, {.batch = config.sequences, .sequence = config.model.context},
               compute_options(config)),
      stream_(device, "compute") {}

Trainer::ParameterList Trainer::parameters_of(const Lease& lease) const {
  ParameterList list;
  for (std::size_t tensor = 0; tensor < model_.units[index_of(lease.unit())].tensors.size();
       ++tensor)
    list.push_back(lease.parameter(tensor));
  return list;
}

Trainer::GradientList Trainer::gradients_of(const Lease& lease) const {
  GradientList list;
  for (std::size_t tensor = 0; tensor < model_.units[index_of(lease.unit())].tensors.size();
       ++tensor)
    list.push_back(lease.gradient(tensor));
  return list;
}

TrainedStep Trainer::train_step(std::uint64_t step_number) {
  TrainedStep trained;
  const StreamGuard guard(device_, stream_);
  Step step = engine_.begin_step({.learning_rate = learning_rate_at(config_, step_number),
                                  .micro_batches = config_.micro_batches});
  for (std::uint32_t micro_batch = 0; micro_batch < config_.micro_batches; ++micro_batch) {
    device_.launch(stream_.id(), [this, step_number, micro_batch] {
      const TokenBatch batch = dataset_.training_batch(step_number, micro_batch);
      compute_.start_training(batch.tokens, batch.targets);
    });
    for (std::uint32_t use = 0; use < model_.forward_order.size(); ++use) {
      const Lease lease = step.acquire(model_.forward_order[use], Pass::kForward, stream_);
      device_.launch(stream_.id(), [this, use, parameters = parameters_of(lease)] {
        compute_.forward(use, parameters);
      });
    }
    device_.launch(stream_.id(), [this, &trained] { trained.loss += compute_.loss(); });
    for (std::uint32_t use = 0; use < model_.backward_order.size(); ++use) {
      const Lease lease = step.acquire(model_.backward_order[use], Pass::kBackward, stream_);
      device_.launch(stream_.id(), [this, use, parameters = parameters_of(lease),
                                    gradients = gradients_of(lease)] {
        compute_.backward(use, parameters, gradients);
      });
    }
  }
  trained.report = step.finish();
  trained.loss /= config_.micro_batches;
  return trained;
}

double Trainer::evaluate(std::span<const TokenBatch> batches) {
  double loss = 0;
  const StreamGuard guard(device_, stream_);
  for (const TokenBatch& batch : batches) {
    Inference inference = engine_.begin_inference();
    device_.launch(stream_.id(),
                   [this, &batch] { compute_.start_evaluation(batch.tokens, batch.targets); });
    for (std::uint32_t use = 0; use < model_.forward_order.size(); ++use) {
      const Lease lease = inference.acquire(model_.forward_order[use], stream_);
      device_.launch(stream_.id(), [this, use, parameters = parameters_of(lease)] {
        compute_.forward(use, parameters);
      });
    }
    device_.launch(stream_.id(), [this, &loss] { loss += compute_.loss(); });
    device_.synchronize(stream_.id());
  }
  return loss / static_cast<double>(batches.size());
}

}  // namespace sluice
