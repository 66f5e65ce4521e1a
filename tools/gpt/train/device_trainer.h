// Trains the GPT on a GPU through the engine's public API: one lease for each use of a unit, whose
// kernels are enqueued on one stream of the device while the engine moves other units.
//
// Thread rule: one thread at a time. The engine, its device, the model and the dataset must outlive
// the trainer.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/engine.h>
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/train/training.h"

namespace sluice {

class DeviceTrainer final : public Training {
 public:
  // `gpt` has the shape that `config` says, on `device`.
  DeviceTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine, Device& device,
                gpt::DeviceGpt& gpt);

  TrainedStep train_step(std::uint64_t step) override;
  double evaluate(std::span<const TokenBatch> batches) override;
  std::uint64_t activation_bytes() const override { return gpt_.activation_bytes(); }

 private:
  const TrainConfig& config_;
  const Dataset& dataset_;
  Engine& engine_;
  Device& device_;
  gpt::DeviceGpt& gpt_;
  ModelSpec model_;
  Stream stream_;  // last: its work uses all of the above
};

}  // namespace sluice
