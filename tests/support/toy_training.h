// A small training job with a made-up computation. The job runs twice: through the engine, and in
// plain arrays as the oracle (toy_oracle.cc). The "gradient" of an element depends on the
// parameter's bits, the step, the micro-batch and the use. So a stale or misplaced parameter, a
// lost gradient or a wrong order of additions changes the result. A use in the forward pass, a use
// of a frozen unit, or an inference changes no state. So every use also computes two digests of the
// bytes on the device. The first digest is computed at the beginning of the use's lease, and the
// second digest at the end. The digests are computed on the use's stream. The header
// tests/support/same_training.h compares both digests.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>

namespace sluice::test {

enum class ToySize : std::uint8_t {
  kUsual,  // 116,000 elements
  kSmall,  // a third of these elements, for tests of many runs
};
// Returns a model with units of uneven sizes. Some tensors have weight decay. One unit is used
// twice, and one unit has a single element.
ModelSpec toy_model(const std::vector<std::uint32_t>& frozen_units = {}, std::uint32_t leases = 1,
                    ToySize size = ToySize::kUsual);
// Returns the sizes of the model's boundary activations, for an engine that keeps activations.
std::vector<std::uint64_t> toy_boundary_bytes();

// One use of a unit. `number` is the place of the use in the planned step, or any other number that
// is unique in the step. The "gradients" depend on this number.
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
  // If `evaluate` is true, the job also evaluates between the steps, as a trainer does.
  bool evaluate = false;
  std::vector<std::uint32_t> frozen_units = {};
  ToySize size = ToySize::kUsual;
  // The number of leases that are held at the same time. This number has an effect only if
  // run_toy() makes the engine. If the caller makes the engine, the model determines the number of
  // leases.
  std::uint32_t leases = 1;
  // If `has_boundaries` is true, the model of run_toy() has boundary activations. If
  // config.activations lets the engine keep these activations, every use saves and loads
  // activations.
  bool has_boundaries = false;
  // The number of streams. Consecutive uses run on consecutive streams.
  std::uint32_t streams = 1;
  // If `has_own_memory` is true, the device of run_toy() imitates a GPU.
  bool has_own_memory = false;
  // This function is called after each step's finish(), before the evaluation.
  std::function<void(Engine& engine, std::uint64_t step)> after_step = {};
  // This function changes the uses of a step, so that the step differs from the plan.
  std::function<void(std::uint64_t step, ToyUses& uses)> change = {};
  // The number of announced units in the model of run_toy(). These units come after all other
  // units. The function `change` can add uses of announced units to a step.
  std::uint32_t experts = 0;
  // If `announces_ahead` is true, a pass announces all uses when the first use begins. If
  // `announces_ahead` is false, a pass announces each group of consecutive uses right before the
  // group begins.
  bool announces_ahead = false;
  // Returns whether `rank` computes in `use`, which is a use of an announced unit. If a rank does
  // not compute in a use, the rank does not announce the use, and gives a gradient of zeros. If the
  // function is empty, every rank always computes.
  std::function<bool(std::uint32_t rank, const ToyUse& use)> computes = {};
  // Each rank computes different gradients. The oracle computes the gradients of all ranks. Without
  // `reduces_each`, the oracle first adds the gradients of each rank's micro-batches, and then adds
  // the sums of the ranks.
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  bool reduces_each = true;
  // The source of the initial state for run_toy(). If `source` is null, the values come from
  // toy_values(). The first step of the run follows the last step of the source.
  StateSource* source = nullptr;
};

// Returns the model that run_toy() makes.
ModelSpec toy_model_of(const ToyOptions& options);

// The state of all tensors, one tensor after another. Each tensor has parameter, master, exp_avg
// and exp_avg_sq.
using StateBytes = std::vector<std::byte>;

StateBytes read_state(Engine& engine);

// The struct has digests of the bytes that a use found on the device.
struct ToySight {
  std::uint64_t version = 0;  // the expected number of updates of the parameters
  UnitId unit{};
  Pass pass = Pass::kForward;
  std::uint64_t digest = 0;  // of the parameters' bytes
  std::uint64_t digest_at_end = 0;

  bool operator==(const ToySight&) const = default;
};
using ToySights = std::vector<ToySight>;

struct ToyResult {
  StateBytes state;
  ToySights sights;  // in order of use
  std::uint64_t activations_seen = 0;
  std::uint64_t activations_wrong = 0;
  std::vector<StepReport> reports;
  Traffic predicted;
};

// Runs the job on `engine`. Before the call, `engine` is not initialized. `device` is the engine's
// device. With a durable store, the job continues from the last commit.
ToyResult run_toy(Engine& engine, const ModelSpec& model, HostDevice& device, const Config& config,
                  const ToyOptions& options);

// Makes a new engine on a new host device, and then calls run_toy(). The device has memory.device
// bytes, or 64 MiB by default.
ToyResult run_toy(const Config& config, const ToyOptions& options);

// The oracle does the training of run_toy() in plain arrays, with the scalar definitions.
ToyResult toy_oracle(const Config& config, const ToyOptions& options);

// Returns the initial masters, for tests that call an engine without run_toy().
InitialValues toy_values();

// Performs all uses of one step, but does not call finish(). Each use acquires a unit, computes
// with the unit, and releases the unit.
void walk_step(Step& step, const ModelSpec& model, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config, std::uint32_t micro_batches,
               MicroBatchOrder order = MicroBatchOrder::kHorizontal);
void walk_step(Step& step, const ToyUses& uses, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config);

// A config of defaults, but for two environment variables: SLUICE_TEST_UNIFIED=off turns
// memory.unified off, and SLUICE_TEST_GUARD=on turns memory.guard on. The script tools/test.sh
// --slow runs the engine's tests with each of them.
Config config_of_environment();

// config_of_environment() with storage in `path`, blocks of 4,096 elements, and two threads.
Config toy_config(const std::string& path);

}  // namespace sluice::test
