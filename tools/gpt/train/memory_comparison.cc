#include "tools/gpt/train/memory_comparison.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <memory>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/sharding.h"
#include "engine/planner/run_plan.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/dataset.h"
#include "tools/gpt/train/fresh_values.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/run_memory.h"

namespace sluice {
namespace {

// More than any pool needs, and far from overflow.
constexpr std::uint64_t kAmple = std::uint64_t{1} << 60;

[[noreturn]] void refuse_comparison(const std::string& message) {
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("--compare-memory: the same training in memory does not fit; compare a "
                          "smaller model or batch, or leave the option out: {}",
                          message));
}

// So that the run's own peak is measured, not that of the comparison.
void forget_peak_memory() {
  std::ofstream("/proc/self/clear_refs") << 5;
}

// Everything has a home in memory, and the budgets hold just that.
TrainConfig all_in_memory(TrainConfig config, const HostMemory& host) {
  Config& engine = config.engine;
  const TierChoice of_update = host.device_is_host ? TierChoice::kHost : TierChoice::kDevice;
  engine.placement = {TierChoice::kDevice, of_update, of_update};
  engine.storage.state = {};
  engine.memory.save_buffers = 0;
  if (engine.activations.home == ActivationHome::kNvme)
    engine.activations.home = ActivationHome::kHost;
  engine.memory.host_bytes = kAmple;
  if (host.device_is_host) engine.memory.device_bytes = kAmple;
  const RunMachine machine = machine_of(host, /*rank_count=*/1);
  const ModelSpec model = validated(training_model(config, host.device_is_host));
  const Layout layout = plan_layout(engine, model);
  const Placement placement = plan_run(engine, model, layout, machine).placement;
  if (const auto shortage = shortage_of(with_pools(host, placement))) refuse_comparison(*shortage);
  engine.memory.host_bytes = placement.host_bytes();
  if (host.device_is_host) engine.memory.device_bytes = placement.device_bytes();
  return config;
}

}  // namespace

bool MemoryComparison::has_losses(std::span<const double> losses_of_run) const {
  const std::size_t both = std::min(losses.size(), losses_of_run.size());
  const auto bits = [](double loss) { return std::bit_cast<std::uint64_t>(loss); };
  return std::ranges::equal(losses_of_run.first(both), std::span(losses).first(both), {}, bits,
                            bits);
}

MemoryComparison train_in_memory(const TrainConfig& run, const HostMemory& host,
                                 const ComparisonOptions& options) {
  if (options.rank_count != 1)
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--compare-memory measures one rank, and {} train together; leave the "
                            "option out",
                            options.rank_count));
  const TrainConfig config = all_in_memory(run, host);
  const auto init = ModelFile::open(options.init_file, config.model);
  const Progress progress("measuring the same training in memory", options.is_quiet);
  MemoryComparison comparison;
  try {
    const Dataset dataset(config, /*ranks=*/1);
    ComputeDevice device(config);
    Engine engine(config.engine, training_model(config, device.is_host()), device.device());
    const std::unique_ptr<Trainer> trainer = device.make_trainer(config, dataset, engine);
    engine.initialize(init != nullptr ? init->initial_values()
                                      : fresh_values(config.model, config.seed));
    for (std::uint64_t step = 0; step < options.steps; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      comparison.losses.push_back(trainer->train_step(step).loss);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      if (step != 0) comparison.step_s += time.count() / static_cast<double>(options.steps - 1);
    }
    engine.drain();  // is no part of a step, as in the run
    comparison.device_pool_bytes = placement_of(engine).device_bytes();
    comparison.host_pool_bytes = placement_of(engine).host_bytes();
    engine.close();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOutOfMemory) refuse_comparison(error.what());
    throw;
  }
  forget_peak_memory();
  return comparison;
}

}  // namespace sluice
