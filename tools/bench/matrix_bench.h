// The bench runs the engine in every cell of the table of `sluice plan --matrix`: every ZeRO stage,
// and every way to offload the state. The ranks, the memory and the collectives are real.
// Computation, Adam, the bus and the drive are held to given rates, so that the plan's times can be
// compared with the measured ones.
//
// Thread rule: one thread of each rank. All ranks make the same calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/rank_world.h>
#include "tools/report/plan_matrix.h"

namespace sluice {

struct MatrixBenchModel {
  std::uint64_t parameters = 0;
  std::uint32_t units = 0;
  std::string path;                         // the folder of the storage
  std::uint64_t rate_bytes_per_second = 0;  // of each rank's drive
  double compute_s = 0;                     // of a step
};

struct MeasuredRow {
  PhaseMarks most_in_use{};    // over all steps
  std::vector<double> step_s;  // from begin_step() to the next begin_step()
};

class MatrixBench {
 public:
  // `world` must outlive the bench.
  // Fails with the errors of Engine, and with kRanks.
  MatrixBench(const MatrixBenchModel& bench, RankWorld& world);
  ~MatrixBench();
  MatrixBench(const MatrixBench&) = delete;
  MatrixBench& operator=(const MatrixBench&) = delete;

  const PlanRequest& request() const { return request_; }
  // The table as planned, at the rates of the runs.
  std::vector<MatrixRow> planned() const { return plan_matrix(request_); }
  // Runs `warm` steps, and then `steps` steps that count. A separate engine runs them.
  // Requires: `row` has no obstacle. Fails with the errors of Engine.
  MeasuredRow measure(const MatrixRow& row, unsigned warm, unsigned steps);

 private:
  std::unique_ptr<Engine> make_engine(const Config& config);
  StepReport step(Engine& engine);
  double device_update_rate();

  PlanRequest request_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Collectives> ranks_;
  Stream stream_;
};

}  // namespace sluice
