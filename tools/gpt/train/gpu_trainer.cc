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

gpt::DeviceGptOptions gpu_options(const TrainConfig& config) {
  return {.checkpoints = checkpoints_of(config), .micro_batches = micro_batches_at_once(config)};
}

GpuTrainer::GpuTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine,
                       Device& device, gpt::DeviceGpt& gpt)
    : config_(config),
      dataset_(dataset),
      engine_(engine),
      device_(device),
      gpt_(gpt),
      at_once_(micro_batches_at_once(config)),
      model_(validated(training_model(config, /*is_on_host=*/false))),
      stream_(device, "compute") {}

GpuTrainer::HeldBoundaries GpuTrainer::boundaries_of(Step& step, std::uint32_t forward_use,
                                                     std::uint32_t micro_batch, Pass pass) {
  HeldBoundaries held;
  held.boundaries.micro_batch = micro_batch % at_once_;
  if (config_.engine.activations.home == ActivationHome::kKeep) return held;
  held.leases = take_boundaries(step,
                                {.forward_use = forward_use,
                                 .use_count = gpt_.use_count(),
                                 .micro_batch = micro_batch,
                                 .pass = pass},
                                stream_);
  held.boundaries.input = held.leases.input;
  held.boundaries.output = held.leases.output;
  held.boundaries.output_gradient = held.leases.output_gradient;
  held.boundaries.input_gradient = held.leases.input_gradient;
  return held;
}

void GpuTrainer::forward(Step& step, const Use& use) {
  if (use.index == 0) {
    // Ranks take turns: together they see what one rank sees with as many more micro-batches.
    const TokenBatch batch =
        dataset_.training_batch(use.step, use.micro_batch * engine_.rank_count() + engine_.rank());
    gpt_.start_training(batch.tokens, batch.targets, stream_.id(), use.micro_batch % at_once_);
  }
  const Lease lease = step.acquire(model_.forward_order[use.index], Pass::kForward, stream_);
  const HeldBoundaries held = boundaries_of(step, use.index, use.micro_batch, Pass::kForward);
  gpt_.forward(use.index, parameters_of(lease, model_), stream_.id(), held.boundaries);
  if (use.index + 1 == gpt_.use_count()) gpt_.keep_loss(stream_.id());
}

void GpuTrainer::backward(Step& step, const Use& use) {
  const Lease lease = step.acquire(model_.backward_order[use.index], Pass::kBackward, stream_);
  const std::uint32_t forward_use = gpt_.use_count() - 1 - use.index;
  const HeldBoundaries held = boundaries_of(step, forward_use, use.micro_batch, Pass::kBackward);
  gpt_.backward(use.index, parameters_of(lease, model_), gradients_of(lease, model_), stream_.id(),
                held.boundaries);
}

TrainedStep GpuTrainer::train_step(std::uint64_t step_number) {
  TrainedStep trained;
  const StreamGuard guard(device_, stream_);
  gpt_.drop_losses();
  Step step = engine_.begin_step({.learning_rate = learning_rate_at(config_, step_number),
                                  .micro_batches = config_.micro_batches,
                                  .order = config_.order.value_or(MicroBatchOrder::kHorizontal)});
  gpt_.set_loss_scale(static_cast<float>(step.loss_scale()));
  for (std::uint32_t first = 0; first < config_.micro_batches; first += at_once_) {
    const auto for_each_use = [&](const auto& body) {
      for (std::uint32_t use = 0; use < gpt_.use_count(); ++use) {
        for (std::uint32_t i = 0; i < at_once_; ++i)
          body(Use{.index = use, .micro_batch = first + i, .step = step_number});
      }
    };
    for_each_use([&](const Use& use) { forward(step, use); });
    for_each_use([&](const Use& use) { backward(step, use); });
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
                           std::vector<double>&) {
    for (std::uint32_t i = 0; i < group.size() && !stop.is_asked(); ++i) {
      if (use == 0) gpt_.start_evaluation(group[i].tokens, group[i].targets, i);
      gpt_.forward(use, parameters_of(lease, model_), stream_.id(), {.micro_batch = i});
      if (use + 1 == gpt_.use_count()) gpt_.keep_loss(stream_.id());
    }
  };
  const auto settle = [&](std::vector<double>& losses) { losses = gpt_.take_losses(stream_.id()); };
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
