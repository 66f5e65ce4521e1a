// A small training job with a made-up computation, run through the engine and, as the oracle, in
// plain arrays (toy_oracle.cc). The "gradient" of an element depends on the parameter's bits, the
// step, the micro-batch and the use, so that a stale or misplaced parameter, a lost gradient or a
// wrong order of additions changes the result. Forward uses, frozen units and inferences have no
// result. So every use takes a digest of the bytes that it finds on the device, on its stream, at
// the beginning and at the end of its lease: tests/support/same_training.h compares both.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>

namespace sluice::test {

// Units of uneven sizes, tensors with and without decay, a unit that is used twice, and one of a
// single element.
ModelSpec toy_model(const std::vector<std::uint32_t>& frozen_units = {}, std::uint32_t leases = 1);

// One use of a unit. `number` is its place in the planned step, or anything else that no other use
// of the step has; "gradients" depend on it.
struct ToyUse {
  UnitId unit{};
  Pass pass = Pass::kForward;
  std::uint64_t number = 0;
};
using ToyUses = std::vector<ToyUse>;

struct ToyOptions {
  std::uint32_t steps = 4;
  std::uint32_t micro_batches = 1;
  double learning_rate = 1e-2;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  // Evaluates between the steps when set, as a trainer does.
  bool evaluate = false;
  std::vector<std::uint32_t> frozen_units = {};
  // Held at once, where run_toy() makes the engine; else the model says it.
  std::uint32_t leases = 1;
  // Streams of the device, on which the uses take turns.
  std::uint32_t streams = 1;
  // The device of run_toy() stands for a GPU.
  bool has_own_memory = false;
  // Changes what a step does from what is planned.
  std::function<void(std::uint64_t step, ToyUses& uses)> change = {};
  // Each rank computes other gradients. The oracle is all of them; without `reduces_each` it adds
  // the micro-batches of a rank before it adds the ranks.
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  bool reduces_each = true;
  // For run_toy(): where the state comes from instead of toy_values(). Steps are counted on.
  StateSource* source = nullptr;
};

// The concatenated state of every tensor: parameter, master, exp_avg, exp_avg_sq.
using StateBytes = std::vector<std::byte>;

StateBytes read_state(Engine& engine);

// The bytes that a use found on the device.
struct ToySight {
  std::uint64_t version = 0;  // updates that its parameters have seen, if they are right
  UnitId unit{};
  Pass pass = Pass::kForward;
  std::uint64_t digest = 0;  // of their bytes
  std::uint64_t digest_at_end = 0;

  bool operator==(const ToySight&) const = default;
};
using ToySights = std::vector<ToySight>;

struct ToyResult {
  StateBytes state;
  ToySights sights;  // in order of use
  std::vector<StepReport> reports;
  Traffic predicted;
};

// Runs the job on `engine`, which is not yet initialized; `device` is its device. With a durable
// store it goes on from the last commit.
ToyResult run_toy(Engine& engine, const ModelSpec& model, HostDevice& device, const Config& config,
                  const ToyOptions& options);

// A new engine on a new host device of memory.device bytes (64 MiB by default), then run_toy().
ToyResult run_toy(const Config& config, const ToyOptions& options);

// The same training in plain arrays with the scalar definitions.
ToyResult toy_oracle(const Config& config, const ToyOptions& options);

// Initial masters, for engines that tests drive themselves.
InitialValues toy_values();

// One step driven by hand up to, but without, finish(): every unit acquired, computed on and
// released.
void walk_step(Step& step, const ModelSpec& model, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config, std::uint32_t micro_batches,
               MicroBatchOrder order = MicroBatchOrder::kHorizontal);
void walk_step(Step& step, const ToyUses& uses, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config);

// A config for tests: storage in `path`, 4,096-element blocks, two threads.
Config toy_config(const std::string& path);

}  // namespace sluice::test
