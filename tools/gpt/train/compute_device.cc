#include "tools/gpt/train/compute_device.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/error.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "gpu/cuda/kernel_list.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/model/cuda_ops.h"
#include "tools/gpt/model/peak_rate.h"
#include "tools/gpt/train/gpu_trainer.h"
#include "tools/gpt/train/host_trainer.h"

namespace sluice {
namespace {

constexpr std::uint64_t kRanksTalkIn = 1_MiB;

// Why no GPU computes what `config` asks for; empty when one can.
std::string why_not_on_gpu(const TrainConfig& config) {
  try {
    gpt::check_device_types(config.engine.precision.parameters, config.engine.precision.gradients);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Why no GPU of this machine does.
std::string why_no_gpu(const TrainConfig& config, int ordinal) {
  const std::string why = why_no_cuda_code(ordinal);
  return why.empty() ? why_not_on_gpu(config) : why;
}

void require_gpu(const TrainConfig& config, const std::string& why) {
  if (config.device == DeviceChoice::kCuda && !why.empty())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("run.device is \"cuda\": {}; \"auto\" computes on the host then", why));
}

}  // namespace

void check_gpu_config(const TrainConfig& config) {
  require_gpu(config, why_not_on_gpu(config));
}

bool computes_on_host(const TrainConfig& config, const GpuChoice& gpu) {
  return config.device == DeviceChoice::kHost ||
         (config.device == DeviceChoice::kAuto && !why_no_gpu(config, gpu.ordinal).empty());
}

ComputeDevice::ComputeDevice(const TrainConfig& config, const GpuChoice& choice) {
  const std::string why =
      config.device == DeviceChoice::kHost ? "run.device" : why_no_gpu(config, choice.ordinal);
  require_gpu(config, why);
  if (!why.empty()) {
    // At least the memory that ranks talk in, so that the engine gets far enough to say which
    // budget works.
    auto host = make_host_device(
        {.memory_bytes = std::max(kRanksTalkIn, host_device_bytes(config.engine))});
    host_ = host.get();
    device_ = std::move(host);
    const DType parameters = config.engine.precision.parameters;
    const gpt::MatmulChoice matmul = gpt::choose_matmul(config.matmul, parameters);
    matrix_kernels_ = gpt::matrix_kernels(matmul);
    table_row_ = gpt::table_row(config.matmul, matmul);
    missed_gain_ = gpt::missed_gain(config.matmul, matmul, parameters);
    description_ = config.device == DeviceChoice::kHost ? "the host" : "the host (" + why + ")";
    if (config.device == DeviceChoice::kAuto && choice.ordinal < cuda_device_count())
      unused_gpu_ = fmt::format(
          "a GPU is here and is not used ({}): {}; run.device \"host\" asks for that, \"cuda\" "
          "refuses it",
          describe_cuda_device(choice.ordinal), why);
    return;
  }
  // Not bounded by memory.device, which is the engine's share: activations come on top.
  // It becomes a member at once, so that everything made on it goes before it, also when something
  // below fails.
  auto gpu = make_cuda_device({.ordinal = choice.ordinal, .memory_source = choice.memory_source});
  gpu_ = gpu.get();
  device_ = std::move(gpu);
  ops_ = gpt::make_cuda_ops(*gpu_, config.engine.precision.parameters,
                            config.engine.precision.gradients);
  gpt_ = std::make_unique<gpt::DeviceGpt>(
      config.model, gpt::BatchShape{.batch = config.sequences, .sequence = config.model.context},
      *gpu_, *ops_, gpu_options(config));
  // Before ranks have communicators, whose work would hold up the loading of code, and before the
  // engine takes the rest of the memory.
  load_kernels(*gpu_);
  gpt_->warm_up();
  description_ = fmt::format("{} (matrix products by {})", gpu_->name(), ops_->description());
  matrix_kernels_ = {.library = std::string(ops_->description()),
                     .kernels = std::string(gpu_->name()),
                     .factors = std::string(name_of(config.engine.precision.parameters))};
}

double ComputeDevice::measure_peak_flops(const TrainConfig& config, bool is_quiet) const {
  if (!is_host())
    throw Error(ErrorCode::kUnsupported,
                "--measure-peak measures on the host only; pass --peak-flops with the GPU's rate");
  const Progress progress("measuring the peak rate of matrix products", is_quiet);
  return gpt::measured_peak_flops(granted_threads(config.engine.threads),
                                  compute_options(config).matmul);
}

std::unique_ptr<Trainer> ComputeDevice::make_trainer(const TrainConfig& config,
                                                     const Dataset& dataset, Engine& engine) {
  if (host_ != nullptr) return std::make_unique<HostTrainer>(config, dataset, engine, *host_);
  return std::make_unique<GpuTrainer>(config, dataset, engine, *device_, *gpt_);
}

}  // namespace sluice
