// The device on which a training run computes. The config's run.device chooses the device. On a
// GPU, this object also owns the model's memory and kernels. The constructor allocates the memory
// and prepares the kernels before the engine takes the rest of the GPU's memory.
// Thread rule: one thread at a time.
#pragma once

#include <memory>
#include <string>

#include <sluice/cuda_device.h>
#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/model/matmul_choice.h"
#include "tools/gpt/train/trainer.h"

namespace sluice {

// The GPU that is used if the run computes on a GPU.
struct GpuChoice {
  int ordinal = 0;
  CudaMemorySource memory_source = {};
};

// Fails with kUnsupported if run.device is "cuda" and no GPU supports the computation that `config`
// asks for.
void check_gpu_config(const TrainConfig& config);
// Whether a run with `config` on this machine computes on the host.
bool computes_on_host(const TrainConfig& config, const GpuChoice& gpu = {});

class ComputeDevice {
 public:
  // With run.device "auto", the object uses a GPU that can compute what `config` asks for. If the
  // machine has no such GPU, the object uses the host.
  // Fails with:
  // - kUnsupported: run.device is "cuda", and no GPU can compute what `config` asks for.
  // - kUnsupported: the host lacks the library or kernels that run.matmul names.
  // - kOutOfMemory: the device has too little memory.
  explicit ComputeDevice(const TrainConfig& config, const GpuChoice& gpu = {});
  ComputeDevice(const ComputeDevice&) = delete;
  ComputeDevice& operator=(const ComputeDevice&) = delete;

  Device& device() { return *device_; }
  HostDevice* host() { return host_; }  // null if the device is not the host
  bool is_host() const { return host_ != nullptr; }
  CudaDevice* gpu() { return gpu_; }  // null if the device is not a GPU
  // A text such as "cuda:0 NVIDIA H200 (matrix products by cuBLASLt 13.0.0)" or "the host (no
  // usable GPU: ...)".
  const std::string& description() const { return description_; }
  // With run.device "auto", a run may compute on the host although the machine has a GPU. If "auto"
  // leaves a GPU unused, the text gives the reason and a remedy. Otherwise, the text is empty.
  const std::string& unused_gpu() const { return unused_gpu_; }

  // The library and kernels of the matrix products. On a GPU, the name of the GPU takes the place
  // of the kernels' name.
  const gpt::MatrixKernels& matrix_kernels() const { return matrix_kernels_; }
  // The result of gpt::table_row(). The text is empty on a GPU.
  const std::string& table_row() const { return table_row_; }
  // If a library that is not installed would compute the products faster, the text names this
  // library. Otherwise, the text is empty.
  const std::string& missed_gain() const { return missed_gain_; }

  // Measures the rate at which the device computes the matrix products of a run with `config`. The
  // device does nothing else during the measurement. The result is in operations per second. Takes
  // about half a second.
  // Fails with kUnsupported on a GPU. Fails with kOutOfMemory if there is not enough memory.
  double measure_peak_flops(const TrainConfig& config, bool is_quiet) const;

  // This object and all arguments must outlive the trainer.
  std::unique_ptr<Trainer> make_trainer(const TrainConfig& config, const Dataset& dataset,
                                        Engine& engine);

 private:
  std::unique_ptr<Device> device_;
  HostDevice* host_ = nullptr;  // device_, if it is the host
  CudaDevice* gpu_ = nullptr;
  std::unique_ptr<gpt::DeviceOps> ops_;
  std::unique_ptr<gpt::DeviceGpt> gpt_;
  std::string description_;
  std::string unused_gpu_;
  gpt::MatrixKernels matrix_kernels_;
  std::string table_row_;
  std::string missed_gain_;
};

}  // namespace sluice
