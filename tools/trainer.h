// Trains the GPT through the engine's public API, as any application would: one lease for each use
// of a unit, computation submitted to a stream of the device.
//
// Thread rule: one thread at a time. The engine, its device and the dataset must outlive the
// trainer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "gpu/host_device.h"
#include "tools/dataset.h"
#include "tools/gpt/gpt_compute.h"

namespace sluice {

struct TrainedStep {
  double loss = 0;  // mean over the micro-batches, before the update
  StepReport report;
};

class Trainer {
 public:
  Trainer(const TrainConfig& config, const Dataset& dataset, Engine& engine, HostDevice& device);

  // Step number `step`, counted from 0: forward and backward over its micro-batches, then the
  // update.
  TrainedStep train_step(std::uint64_t step);

  // Mean cross-entropy in nats a token.
  double evaluate(std::span<const TokenBatch> batches);

  std::uint64_t activation_bytes() const { return compute_.activation_bytes(); }

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
