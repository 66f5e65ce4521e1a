#include "tools/tune/trial.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include <sluice/engine.h>
#include "engine/engine_access.h"
#include "engine/plan/sharding.h"
#include "engine/planner/run_plan.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/dataset.h"
#include "tools/gpt/train/fresh_values.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/report/median.h"
#include "tools/report/step_limits.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Settles budgets and order as `sluice train` does for one process, and returns the machine of it.
RunMachine settle(TrainConfig& config) {
  config.engine.storage.state = {};
  config.trace_file.clear();
  config.has_status = false;
  const bool is_on_host = computes_on_host(config);
  const HostMemory share =
      share_of_host(is_on_host, kept_activation_bytes(config, is_on_host), /*ranks=*/1);
  settle_budgets(config.engine.memory, share);
  const RunMachine machine = machine_of(share, 1);
  resolve_order(config, machine);
  (void)check_memory(config, machine, share);
  return machine;
}

// The policy of a whole run. There "auto" speculates once it has seen 32 steps without clipping,
// more than a trial has. `config` has the run's own storage.state.
OverlapPolicy policy_of_run(const Config& config, const ModelSpec& given, RunMachine machine,
                            const Device& device) {
  if (!machine.device_is_host)
    machine.device_bytes = device.capacity_bytes() - device.allocated_bytes();
  const ModelSpec model = validated(given);
  const Layout layout =
      plan_layout(config, model, shard_of(config.sharding, /*rank=*/0, machine.ranks));
  return plan_run(config, model, layout, machine).policy;
}

}  // namespace

double Trial::median_s() const {
  return median(step_s);
}

Trial run_trial(TrainConfig config, unsigned steps,
                const std::function<void(unsigned step)>& progress) {
  const Clock::time_point begin = Clock::now();
  const ModelSpec model = training_model(config, computes_on_host(config));
  const Config::Storage::State state = config.engine.storage.state;
  const RunMachine machine = settle(config);
  const Dataset dataset(config);
  ComputeDevice device(config);
  Config run = config.engine;
  run.storage.state = state;
  config.engine.optimizer.overlap = policy_of_run(run, model, machine, device.device());
  Engine engine(config.engine, model, device.device());
  const std::unique_ptr<Trainer> trainer = device.make_trainer(config, dataset, engine);
  engine.initialize(fresh_values(config.model, config.seed));
  LimitMeter meter(engine, validated(model), config.micro_batches, *config.order,
                   /*calibration=*/{});
  Trial trial;
  trial.began_s = seconds_since(begin);
  trial.device_budget_bytes = placement_of(engine).device_budget_bytes;
  for (unsigned step = 0; step <= steps; ++step) {
    progress(step);
    const Clock::time_point step_begin = Clock::now();
    meter.step_begins();
    meter.note(trainer->train_step(step).report);
    if (step != 0) trial.step_s.push_back(seconds_since(step_begin));
  }
  engine.drain();
  if (const auto limits = meter.limits()) trial.rates = limits->rates;
  engine.close();
  return trial;
}

}  // namespace sluice
