// The bench runs the engine with emulated computation. The model has equal units. The compute
// stream of the host device is busy for given times, and storage lies behind a throttled queue. All
// other parts of the run are real. The limits of a step's time are therefore known exactly, and do
// not depend on the machine's drive and processor. The bench compares the measured time of a step
// with the limits.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "base/trace/trace_recorder.h"
#include "engine/bound/bound.h"
#include "engine/bound/planned_step.h"
#include "io/throttled_queue.h"

namespace sluice {

// Returns a model of equal units. Each unit has one tensor. All units together have at least
// `parameters` parameters.
ModelSpec equal_units(std::uint64_t parameters, std::uint32_t units);

struct StepBenchModel {
  std::uint64_t parameters = 0;
  std::uint32_t units = 0;
  std::string path;                    // the folder of the storage
  std::optional<std::uint32_t> lanes;  // empty = a tenth of the blocks
  // The share of the state that lives in host memory: 0 = all state on storage, 1 = all state in
  // host memory.
  double memory_share = 0;
  unsigned threads = 0;            // threads of the optimizer; 0 = as many as granted cores
  std::uint32_t window_units = 3;  // the units that fit the device window
  bool window_holds_all = false;   // true: all units fit the window
  // `commit_every` is the number of steps per commit of a durable store. If `commit_every` is 0,
  // the state lies in scratch files. Each flush of a commit occupies the throttled drive for
  // `flush_s` seconds. The names of the store and of the folder of checkpoints contain `number`, so
  // several engines can use the same `path`.
  std::uint32_t number = 0;
  std::uint32_t commit_every = 0;
  double flush_s = 5e-3;
  std::uint64_t write_cache_bytes = 0;  // the write cache of the throttled drive; 0 = none
  // The number of steps from one checkpoint to the next; 0 = no checkpoints. Checkpoints are
  // written while training continues. The throttle does not slow down checkpoints.
  std::uint32_t save_every = 0;
  // `experts` is the number of experts that follow each unit. A step uses `active_experts` experts
  // per unit. An expert is an announced unit, and all units have the same size. Every step chooses
  // its experts anew, and does not use the other experts.
  std::uint32_t experts = 0;
  std::uint32_t active_experts = 0;
  // If true, only the first unit has experts. The experts then stand for groups of rows of a table.
  // The rows that a step uses are known before the step begins.
  bool has_table = false;
  // If true, every unit is frozen, and an adapter follows each unit. An adapter is a trained unit
  // that has 1/kAdapterShare of the frozen unit's size. The state of the adapters is in host
  // memory.
  bool has_adapters = false;
  // If true, the device updates the blocks (optimizer.update_on "device").
  bool streams = false;

  std::uint32_t routers() const { return has_table ? 1 : units; }
  std::uint32_t unit_count() const {
    return (has_adapters ? 2 * units : units) + routers() * experts;
  }
  std::uint32_t used_units() const {
    return (has_adapters ? 2 * units : units) + routers() * active_experts;
  }
};

inline constexpr std::uint64_t kAdapterShare = 128;

// The rates of Adam and of gradient norms, in parameters per second.
struct CpuRates {
  double adam = 0;
  double norm = 0;
};

// The time of a step, and the engine's report on this step.
struct MeasuredStep {
  double step_s = 0;  // from begin_step() to the next begin_step()
  StepReport report;
  // Under the serial policy, this step would read and write these numbers of bytes of state.
  std::uint64_t wanted_read_bytes = 0;
  std::uint64_t wanted_write_bytes = 0;
};

// The number and the costs of the checkpoints that were written while steps ran.
struct SaveCosts {
  std::uint32_t count = 0;
  double duration_s = 0;  // each of the three times is a sum over checkpoints
  double blocked_s = 0;
  double update_wait_s = 0;
};

class StepBench {
 public:
  // `rates` gives the throttled rates of storage and copies, and the emulated computation times of
  // the units.
  // Fails with the errors of Engine.
  StepBench(const StepBenchModel& model, OverlapPolicy policy, const Rates& rates);
  ~StepBench();

  // Runs `warm` steps, then `measured` steps, and then one more step. The last measured step ends
  // when the additional step begins. The call then waits until the engine has drained, and returns
  // the measured steps. If checkpoints are written, the first checkpoint begins with the first
  // measured step. The last checkpoint ends with the last measured step.
  std::vector<MeasuredStep> run(unsigned warm, unsigned measured);

  Engine& engine() { return *engine_; }
  // The number of parameters in the frozen units.
  std::uint64_t frozen_parameters() const;
  // The rates of Adam and of the gradient norms in the last run(). The rates were measured during
  // the steps, while the other work of the steps was running.
  const CpuRates& cpu_rates() const { return cpu_rates_; }
  const SaveCosts& saves() const { return saves_; }
  // The sum of the delays of all requests so far, in seconds. A request has a delay if the real
  // drive completed the request later than the emulated drive did. The delay is the difference
  // between these two times.
  double late_s() const { return static_cast<double>(throttle_->late_ns()) * 1e-9; }

  // Both functions use this engine's plan and the rates in `rates`. bound() returns T_bound.
  // minimum() returns T_min.
  StepCost bound(const Rates& rates) const;
  StepCost minimum(const Rates& rates) const;

 private:
  StepReport step();
  std::vector<UnitId> experts_of(std::uint32_t unit, std::uint64_t step) const;
  void use(Step& step, UnitId unit, Pass pass);
  void save_if_due(unsigned step);
  void count(const std::optional<SavedCheckpoint>& saved);
  PlannedStep planned() const;

  const StepBenchModel bench_;
  OverlapPolicy policy_;
  Rates rates_;
  CpuRates cpu_rates_;
  ModelSpec model_;
  std::unique_ptr<HostDevice> device_;
  Config::Storage storage_;  // names a durable store, which the destructor removes
  std::string checkpoints_;  // the folder of checkpoints, which the destructor removes
  std::uint32_t save_every_ = 0;
  SaveCosts saves_;
  ThrottledQueue* throttle_ = nullptr;  // the engine's queue
  std::unique_ptr<Engine> engine_;
  Stream stream_;
};

// Returns the least time, in seconds, that the storage traffic of one step needs. The function
// assumes that all state is on storage, and that parameters are bf16. Such a step reads 14 bytes
// and writes 12 bytes per parameter.
double ideal_storage_s(const Rates& rates, std::uint64_t parameters);

// Measures the rates of Adam and of gradient norms with `threads` threads. The state is split bf16.
// Nothing else should run during the measurement.
CpuRates measure_cpu_rates(std::uint64_t parameters, unsigned threads);
// Measures how many parameters per second the host device updates. The host device has one thread
// for updates.
double measure_device_update(std::uint64_t parameters);

}  // namespace sluice
