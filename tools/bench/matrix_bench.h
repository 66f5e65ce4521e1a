// The bench runs the engine for every cell of the table that `sluice plan --matrix` prints. The
// table has one cell for each combination of a ZeRO stage and a way to offload the state. The
// ranks, the memory and the collectives are real. The bench limits computation, Adam, the bus and
// the drive to fixed rates, so that the planned times can be compared with the measured times.
//
// Thread rule: one thread per rank. All ranks must make the same calls.
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
  std::uint64_t rate_bytes_per_second = 0;  // the rate of each rank's drive
  double compute_s = 0;                     // seconds of computation in a step
};

struct MeasuredRow {
  PhaseMarks most_in_use{};    // over all steps
  std::vector<double> step_s;  // from begin_step() to the next begin_step()
};

class MatrixBench {
 public:
  // `world` must outlive the bench.
  // Fails with the errors of Engine and of RankWorld::join().
  MatrixBench(const MatrixBenchModel& bench, RankWorld& world);
  ~MatrixBench();
  MatrixBench(const MatrixBench&) = delete;
  MatrixBench& operator=(const MatrixBench&) = delete;

  const PlanRequest& request() const { return request_; }
  // Returns the planned table. The plan uses the rates at which the bench runs.
  std::vector<MatrixRow> planned() const { return plan_matrix(request_); }
  // Makes an engine for `row`. Runs `warm` steps first, and then `steps` measured steps.
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
