#include "tools/gpt/train/gpu_trainer.h"

#include <string>
#include <utility>
#include <vector>

#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/stream_guard.h"

namespace sluice {
namespace {

std::vector<const std::byte*> parameters_of(const Lease& lease, const ModelSpec& model) {
  std::vector<const std::byte*> list;
  for (std::size_t i = 0; i < model.units[index_of(lease.unit())].tensors.size(); ++i)
    list.push_back(lease.parameter(i));
  return list;
}

std::vector<std::byte*> gradients_of(const Lease& lease, const ModelSpec& model) {
  std::vector<std::byte*> list;
  for (std::size_t i = 0; i < model.units[index_of(lease.unit())].tensors.size(); ++i)
    list.push_back(lease.gradient(i));
  return list;
}

}  // namespace

GpuTrainer::GpuTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine,
                       Device& device, gpt::DeviceGpt& gpt)
    : config_(config),
      dataset_(dataset),
      engine_(engine),
      device_(device),
      gpt_(gpt),
      model_(validated(gpt::gpt_model_spec(config.model))),
      stream_(device, "compute") {}

TrainedStep GpuTrainer::train_step(std::uint64_t step_number) {
  TrainedStep trained;
  const StreamGuard guard(device_, stream_);
  gpt_.drop_losses();
  Step step = engine_.begin_step({.learning_rate = learning_rate_at(config_, step_number),
                                  .micro_batches = config_.micro_batches});
  gpt_.set_loss_scale(static_cast<float>(step.loss_scale()));
  for (std::uint32_t micro_batch = 0; micro_batch < config_.micro_batches; ++micro_batch) {
    const TokenBatch batch =
        dataset_.training_batch(step_number, micro_batch * engine_.rank_count() + engine_.rank());
    gpt_.start_training(batch.tokens, batch.targets, stream_.id());
    for (std::uint32_t use = 0; use < model_.forward_order.size(); ++use) {
      const Lease lease = step.acquire(model_.forward_order[use], Pass::kForward, stream_);
      gpt_.forward(use, parameters_of(lease, model_), stream_.id());
    }
    gpt_.keep_loss(stream_.id());
    for (std::uint32_t use = 0; use < model_.backward_order.size(); ++use) {
      const Lease lease = step.acquire(model_.backward_order[use], Pass::kBackward, stream_);
      gpt_.backward(use, parameters_of(lease, model_), gradients_of(lease, model_), stream_.id());
    }
  }
  trained.report = step.finish(finish_options_);
  for (std::string& note : gpt_.take_notes()) trained.report.notes.push_back(std::move(note));
  for (const double loss : gpt_.take_losses(stream_.id())) trained.loss += loss;
  trained.loss /= config_.micro_batches;
  return trained;
}

std::optional<double> GpuTrainer::evaluate_until(const StopRequest& stop,
                                                 std::span<const TokenBatch> batches) {
  const auto forward = [&](const Lease& lease, std::uint32_t use, std::span<const TokenBatch> group,
                           double&) {
    for (std::uint32_t i = 0; i < group.size() && !stop.is_asked(); ++i) {
      if (use == 0) gpt_.start_evaluation(group[i].tokens, group[i].targets, i);
      gpt_.forward(use, parameters_of(lease, model_), stream_.id(), i);
      if (use + 1 == gpt_.use_count()) gpt_.keep_loss(stream_.id());
    }
  };
  const auto settle = [&](double& loss) {
    for (const double kept : gpt_.take_losses(stream_.id())) loss += kept;
  };
  gpt_.drop_losses();
  return mean_loss({.engine = engine_,
                    .device = device_,
                    .stream = stream_,
                    .forward_order = model_.forward_order,
                    .batches_at_once = gpt_.evaluation_batches(),
                    .settle = settle},
                   stop, batches, forward);
}

}  // namespace sluice
