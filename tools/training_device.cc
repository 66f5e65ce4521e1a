#include "tools/training_device.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/topology.h"
#include "gpu/cuda_device.h"
#include "tools/device_trainer.h"
#include "tools/gpt/cuda_ops.h"
#include "tools/trainer.h"

namespace sluice {
namespace {

// Why `config` cannot be computed on a GPU of this machine; empty when it can.
std::string why_no_gpu(const TrainConfig& config, int ordinal) {
  if (std::string why = why_no_cuda_device(ordinal); !why.empty()) return why;
  if (config.engine.activations.home != ActivationHome::kKeep)
    return "activations are kept by the GPU's own computation; \"activations\" has to be \"keep\"";
  try {
    gpt::check_device_types(config.engine.precision.parameters, config.engine.precision.gradients);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TrainingDevice::TrainingDevice(const TrainConfig& config, const GpuChoice& choice) {
  const std::string why =
      config.device == DeviceChoice::kHost ? "run.device" : why_no_gpu(config, choice.ordinal);
  if (config.device == DeviceChoice::kCuda && !why.empty())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("run.device is \"cuda\": {}; \"auto\" computes on the host then", why));
  if (!why.empty()) {
    auto host = make_host_device(
        {.memory_bytes = config.engine.memory.device_bytes.value_or(topology().memory_bytes / 4)});
    host_ = host.get();
    device_ = std::move(host);
    description_ = config.device == DeviceChoice::kHost ? "the host" : "the host (" + why + ")";
    return;
  }
  // Not bounded by memory.device, which is the engine's share: activations come on top.
  auto gpu = make_cuda_device({.ordinal = choice.ordinal, .memory_source = choice.memory_source});
  ops_ = gpt::make_cuda_ops(*gpu, config.engine.precision.parameters,
                            config.engine.precision.gradients);
  gpt_ = std::make_unique<gpt::DeviceGpt>(
      config.model, gpt::BatchShape{.batch = config.sequences, .sequence = config.model.context},
      *gpu, *ops_);
  description_ = fmt::format("{} (matrix products by {})", gpu->name(), ops_->description());
  gpu_ = gpu.get();
  device_ = std::move(gpu);
}

std::unique_ptr<Training> TrainingDevice::make_trainer(const TrainConfig& config,
                                                       const Dataset& dataset, Engine& engine) {
  if (host_ != nullptr) return std::make_unique<Trainer>(config, dataset, engine, *host_);
  return std::make_unique<DeviceTrainer>(config, dataset, engine, *device_, *gpt_);
}

}  // namespace sluice
