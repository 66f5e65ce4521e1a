// Measurements of a GPU, and of training on a GPU. bench_copies() measures copies between host and
// device. bench_adam_kernel() measures the speed of the optimizer's kernel as a share of the
// memory's bandwidth. bench_training() measures training steps of GPT-2. The model's state is in
// host memory or on storage. The functions accept any device, so tests can run the functions on the
// host.
// Thread rule: one measurement at a time.
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

// The median, the smallest value and the largest value of all rounds.
struct GpuSpread {
  double median = 0;
  double least = 0;
  double most = 0;
};
GpuSpread gpu_spread(std::vector<double> values);

struct CopyBench {
  std::string direction;     // "up", "down", "both"
  GpuSpread gb_per_s;        // copies through Device, as in the engine; "both" = up plus down
  GpuSpread plain_gb_per_s;  // the same copies in a plain loop; measured in the same rounds
  GpuSpread percent;         // spread of the ratios, one ratio per round
};

struct CopyBenchOptions {
  std::uint64_t size_bytes = 0;  // in each direction
  std::uint64_t unit_bytes = 0;
  unsigned rounds = 0;
};
// The type PlainCopies stands for a function that copies data in a plain loop. The function copies
// from `host_up` to `device_up`, and from `device_down` to `host_down`. The function returns the
// time of the loop in seconds.
struct PlainCopy {
  std::byte* host_up = nullptr;  // null = no copy in this direction
  std::byte* device_up = nullptr;
  std::byte* host_down = nullptr;
  std::byte* device_down = nullptr;
};
using PlainCopies = std::function<double(const PlainCopy& ends)>;
std::vector<CopyBench> bench_copies(Device& device, const CopyBenchOptions& options,
                                    const PlainCopies& plain);

// The rates at which host memory serves copies in both directions and the processor at once.
struct HostMemoryBench {
  GpuSpread gb_per_s;       // both together
  GpuSpread copy_gb_per_s;  // the copies' part, up plus down
};
// `move` loads host memory by the processor, and returns how many bytes it has read and written.
HostMemoryBench bench_host_memory(Device& device, const CopyBenchOptions& options,
                                  const std::function<std::uint64_t()>& move);

// The bytes that AdamW reads and writes per parameter. Parameters and gradients are bf16, and the
// master is split. AdamW reads the parameter, the low half of the master, both moments and the
// gradient. AdamW writes the same values, except the gradient.
inline constexpr std::uint64_t kAdamBytesPerParameter = 14 + 12;
struct AdamKernelBench {
  std::uint64_t parameters = 0;
  GpuSpread gb_per_s;
  GpuSpread copy_gb_per_s;  // device to device, bytes read and written
  GpuSpread percent;        // spread of the ratios, one ratio per round

  double parameters_per_s() const { return gb_per_s.median * 1e9 / kAdamBytesPerParameter; }
};
AdamKernelBench bench_adam_kernel(Device& device, DeviceMath& math, std::uint64_t parameters,
                                  unsigned rounds);

// The measured values of training steps that an engine runs. One step runs before the measured
// steps.
struct TrainingBench {
  double tokens_per_s = 0;  // in the median step
  GpuSpread step_s;
  double stall_s = 0;         // in the median step
  double compute_step_s = 0;  // time of the same passes without transfers and updates
  double percent_of_compute = 0;
  // `t_min_s` is the busy time of the scarcest resource in a step (engine/bound/bound.h).
  // `percent_of_t_min` is `t_min_s` as a percentage of the time of the median step.
  double t_min_s = 0;
  double percent_of_t_min = 0;
  // `t_bound_s` is the time of a step in the ideal schedule (engine/bound/bound.h). The schedule
  // follows the fastest policy that `config` permits. `t_bound_s` assumes that all uses of units
  // take equally long.
  double t_bound_s = 0;
  double percent_of_t_bound = 0;
  // The peak memory use of the engine.
  std::array<std::uint64_t, kStepPhases> device_most_bytes{};  // by StepPhase
  std::uint64_t device_pool_bytes = 0;
  std::uint64_t host_pool_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t activation_bytes = 0;
};
// `rates` gives the rates of storage, copies and the optimizer. The function measures only the rate
// of computation.
// Fails with kOutOfMemory, kNoSpace or another error if the machine is too small for `config`.
TrainingBench bench_training(const TrainConfig& config, Device& device, gpt::DeviceOps& ops,
                             unsigned steps, Rates rates);

// The rates of a drive that reads or writes alone, in bytes per second. `interference` has the same
// meaning as in set_storage_rates().
struct DriveMeasurement {
  double read = 0;
  double write = 0;
  double interference = 1;
};

// Measures the drive under `path`. The function also stores the rates in `rates`, so that reading
// and writing at the same time takes the measured time. The test file has no name.
// Fails with the errors of IoBench.
DriveMeasurement measure_drive(const std::string& path, std::uint64_t file_bytes, Rates& rates);

// Writes `count` random tokens to the file `path`. Each token is a uint16 below `vocabulary`.
void write_random_tokens(const std::string& path, std::uint32_t vocabulary, std::uint64_t count);

}  // namespace sluice
