#include "tools/gpt/train/run_memory.h"

#include <sluice/units.h>
#include "base/topology.h"
#include "engine/plan/sharding.h"
#include "engine/planner/run_plan.h"
#include "io/direct_file.h"
#include "tools/cli/print.h"
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/train/gpu_trainer.h"
#include "tools/gpt/train/host_trainer.h"

namespace sluice {
namespace {

// Code, libraries, threads and what they allocate.
constexpr std::uint64_t kProgramBytes = 64_MiB;

}  // namespace

std::uint64_t kept_activation_bytes(const TrainConfig& config, bool device_is_host) {
  if (device_is_host)
    return gpt::GptCompute::activation_bytes_of(config.model, batch_shape(config),
                                                compute_options(config));
  return gpt::DeviceGpt::activation_bytes_of(
      config.model, batch_shape(config), config.engine.precision.parameters, gpu_options(config));
}

HostMemory share_of_host(bool device_is_host, std::uint64_t activation_bytes, std::uint32_t ranks) {
  return {.device_is_host = device_is_host,
          .beside_bytes = kProgramBytes + (device_is_host ? activation_bytes : 0),
          .ranks = ranks,
          .room = ranks == 1 ? memory_room() : MemoryRoom{topology().memory_bytes, "the machine"}};
}

void settle_budgets(Config::Memory& memory, const HostMemory& host) {
  const bool has_auto = (host.device_is_host && !memory.device_bytes) || !memory.host_bytes;
  if (has_auto) require_room(host);
  memory = with_budgets(memory, host);
}

RunMachine machine_of(const HostMemory& host, std::uint32_t rank_count) {
  return {.ranks = rank_count,
          .device_is_host = host.device_is_host,
          .host_memory_bytes = topology().memory_bytes,
          .free_bytes = [sharing = host.ranks](const std::string& path) {
            return free_bytes(path) / sharing;
          }};
}

HostMemory with_pools(HostMemory host, const Placement& placement) {
  host.device_pool_bytes = host.device_is_host ? placement.device_bytes() : 0;
  host.host_pool_bytes = placement.host_bytes();
  return host;
}

HostMemory check_memory(const TrainConfig& config, const RunMachine& machine, HostMemory host) {
  const Config& engine = config.engine;
  const ModelSpec model = validated(training_model(config, machine.device_is_host));
  const Layout layout =
      plan_layout(engine, model, shard_of(engine.sharding, /*rank=*/0, machine.ranks));
  const Placement placement = plan_run(engine, model, layout, machine).placement;
  host = with_pools(std::move(host), placement);
  if (host.ranks > 1) host.room = memory_room();
  if (const auto note = settle_shortage(shortage_of(host), engine.memory.check); !note.empty())
    warn("sluice: {}\n", note);
  return host;
}

}  // namespace sluice
