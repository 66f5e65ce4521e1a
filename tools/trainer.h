// Trains the GPT on the host through the engine's public API, as any application would: one lease
// for each use of a unit, computation submitted to a stream of the device.
//
// Thread rule: one thread at a time. The engine, its device and the dataset must outlive the
// trainer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "gpu/host_device.h"
#include "tools/gpt/gpt_compute.h"
#include "tools/training.h"

namespace sluice {

class Trainer final : public Training {
 public:
  Trainer(const TrainConfig& config, const Dataset& dataset, Engine& engine, HostDevice& device);

  TrainedStep train_step(std::uint64_t step) override;
  double evaluate(std::span<const TokenBatch> batches) override;
  std::uint64_t activation_bytes() const override { return compute_.activation_bytes(); }

 private:
  using ParameterList = std::vector<const std::byte*>;
  using GradientList = std::vector<std::byte*>;

  ParameterList parameters_of(const Lease& lease) const;
  GradientList gradients_of(const Lease& lease) const;

  const TrainConfig& config_;
  const Dataset& dataset_;
  Engine& engine_;
  HostDevice& device_;
  ModelSpec model_;
  gpt::GptCompute compute_;
  Stream stream_;  // last: its work uses all of the above
};

}  // namespace sluice
