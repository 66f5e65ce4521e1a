// The engine under emulated computation: a model of equal units on a host device whose compute
// stream is busy for stated times, storage behind a throttled queue, everything else real. So the
// limits of a step are known exactly, whatever the machine's drive and processor do, and its time
// can be compared with them.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "base/trace/trace.h"
#include "engine/bound/bound.h"
#include "io/throttled_queue.h"

namespace sluice {

struct StepBenchModel {
  std::uint64_t parameters = 0;
  std::uint32_t units = 0;
  std::string path;                    // of the storage
  std::optional<std::uint32_t> lanes;  // nothing = a tenth of the blocks
  // Share of the state; 0 = all of it on storage, 1 = all of it in host memory.
  double memory_share = 0;
  unsigned threads = 0;            // of the optimizer; 0 = the granted cores
  std::uint32_t window_units = 3;  // that the device window has room for
  bool window_holds_all = false;   // or all of them
  // The state lies in a durable store with a commit every so many steps; 0 = in scratch files. Each
  // of a commit's flushes keeps the throttled drive for so long.
  std::uint32_t commit_every = 0;
  double flush_s = 5e-3;
};

// Adam and gradient norms: parameters a second.
struct CpuRates {
  double adam = 0;
  double norm = 0;
};

// A step's time, and the engine's report of it.
struct MeasuredStep {
  double step_s = 0;  // from its begin_step to the next
  StepReport report;
};

class StepBench {
 public:
  // `rates` holds the throttles and the emulated times: storage, copies and units.
  // Fails with: as Engine.
  StepBench(const StepBenchModel& model, OverlapPolicy policy, const Rates& rates);
  ~StepBench();

  // `warm` steps, then as many measured ones as asked for, then one to end the last; drained.
  std::vector<MeasuredStep> run(unsigned warm, unsigned measured);

  Engine& engine() { return *engine_; }
  // The rates of Adam and the norms in the steps of the last run(), beside everything else.
  const CpuRates& cpu_rates() const { return cpu_rates_; }
  // How much later the drive was than its throttle so far, summed over all requests.
  double late_s() const { return static_cast<double>(throttle_->late_ns()) * 1e-9; }

  // The bounds of this engine's plan at `rates`.
  StepCost bound(const Rates& rates) const;
  StepCost minimum(const Rates& rates) const;

 private:
  StepReport step();
  template <class Function>
  StepCost with_shape(const Rates& rates, const Function& function) const;

  OverlapPolicy policy_;
  Rates rates_;
  CpuRates cpu_rates_;
  ModelSpec model_;
  std::unique_ptr<HostDevice> device_;
  Config::Storage storage_;             // with a store, to be removed at the end
  ThrottledQueue* throttle_ = nullptr;  // the engine's
  std::unique_ptr<Engine> engine_;
  Stream stream_;
};

// Seconds that one step's storage traffic takes at least with all of the state there and bf16: 14
// bytes read and 12 written per parameter.
double ideal_storage_s(const Rates& rates, std::uint64_t parameters);

// Adam and norms over split bf16 state on `threads` threads, measured now, with nothing else at
// work.
CpuRates measure_cpu_rates(std::uint64_t parameters, unsigned threads);

}  // namespace sluice
