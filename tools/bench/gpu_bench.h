// Measurements of a GPU and of training on it. The measurements cover copies between host and
// device, the speed of the optimizer's kernel as a share of the memory's bandwidth, and steps of
// GPT-2 with its state in several places. The functions take any device, so that tests run them on
// the host. Thread rule: one measurement at a time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "engine/plan/pool_meter.h"
#include "gpu/math/device_math.h"
#include "tools/gpt/model/device_ops.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// The median and extremes of the rounds.
struct GpuSpread {
  double median = 0;
  double least = 0;
  double most = 0;
};
GpuSpread gpu_spread(std::vector<double> values);

struct CopyBench {
  std::string direction;     // "up", "down", "both"
  GpuSpread gb_per_s;        // through Device, as in the engine; for "both", the sum
  GpuSpread plain_gb_per_s;  // the same bytes by the plain loop, in the same rounds
  GpuSpread percent;         // of the ratios within each round
};

struct CopyBenchOptions {
  std::uint64_t size_bytes = 0;  // each way
  std::uint64_t unit_bytes = 0;
  unsigned rounds = 0;
};
// The function copies this many bytes up and down in a plain loop, and returns the seconds.
struct PlainCopy {
  std::byte* host_up = nullptr;  // null = no copy in this direction
  std::byte* device_up = nullptr;
  std::byte* host_down = nullptr;
  std::byte* device_down = nullptr;
};
using PlainCopies = std::function<double(const PlainCopy& ends)>;
std::vector<CopyBench> bench_copies(Device& device, const CopyBenchOptions& options,
                                    const PlainCopies& plain);

// The bytes for AdamW over bf16 parameters with a split master and bf16 gradients. The parameter,
// the low half, both moments and the gradient are read. Everything except the gradient is also
// written.
inline constexpr std::uint64_t kAdamBytesPerParameter = 14 + 12;
struct AdamKernelBench {
  std::uint64_t parameters = 0;
  GpuSpread gb_per_s;
  GpuSpread copy_gb_per_s;  // device to device, bytes read and written
  GpuSpread percent;        // of the ratios within each round

  double parameters_per_s() const { return gb_per_s.median * 1e9 / kAdamBytesPerParameter; }
};
AdamKernelBench bench_adam_kernel(Device& device, DeviceMath& math, std::uint64_t parameters,
                                  unsigned rounds);

// The result of training steps with an engine, after one step that is not counted.
struct TrainingBench {
  double tokens_per_s = 0;  // in the median step
  GpuSpread step_s;
  double stall_s = 0;         // in the median step
  double compute_step_s = 0;  // the same passes without transfers and updates
  double percent_of_compute = 0;
  // The busy time of the scarcest resource (engine/bound/bound.h), and its ratio to the median
  // step.
  double t_min_s = 0;
  double percent_of_t_min = 0;
  // The ideal schedule under the policies that `config` permits (engine/bound/bound.h). Every use
  // of a unit counts as equally long.
  double t_bound_s = 0;
  double percent_of_t_bound = 0;
  // The peak memory use of the engine.
  std::array<std::uint64_t, kStepPhases> device_most_bytes{};  // by StepPhase
  std::uint64_t device_pool_bytes = 0;
  std::uint64_t host_pool_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t activation_bytes = 0;
};
// Fails with kOutOfMemory, kNoSpace and others, if the machine is too small for `config`. `rates`
// has the rates of storage, copies and the optimizer. The rate of computation is measured.
TrainingBench bench_training(const TrainConfig& config, Device& device, gpt::DeviceOps& ops,
                             unsigned steps, Rates rates);

// The function measures how fast the drive under `path` reads, how fast the drive writes, and how
// fast the drive reads and writes at the same time. The results become the drive's rates in
// `rates`. The test file has no name.
// Fails with kNoSpace, kInput or kIo.
void measure_drive(const std::string& path, std::uint64_t file_bytes, Rates& rates);

// The function writes random tokens below `vocabulary` (uint16) to `path`.
void write_random_tokens(const std::string& path, std::uint32_t vocabulary, std::uint64_t count);

}  // namespace sluice
