// These functions train a model while the checkpoint of an earlier step is being written. The toy
// training's oracle gives the expected states. Thread rule: one thread.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <sluice/checkpoint.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/slow_writes.h"

namespace sluice::test {

// With this delay, a write takes longer than a step, so the steps overtake the save.
inline constexpr std::chrono::microseconds kSlow{2000};

inline StateBytes state_in(const std::string& folder, Config config, const ToyOptions& options) {
  CheckpointSource source(folder);
  source.verify();
  config.placement = {TierChoice::kDevice, TierChoice::kHost};
  config.memory = {};
  config.storage.state.name.clear();
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config, toy_model_of(options), *device);
  engine.restore(source);
  return read_state(engine);
}

// A checkpoint of step 2 that was written while later steps ran, and the state after step 5.
struct Beside {
  std::optional<SavedCheckpoint> saved;
  std::uint64_t steps = 0;  // steps that ran while the checkpoint was being written
  StateBytes at_end;
};

inline Beside save_beside(const Config& config, ToyOptions options, const std::string& root,
                          std::chrono::microseconds wait) {
  Beside beside;
  options.steps = 5;
  options.after_step = [&](Engine& engine, std::uint64_t step) {
    if (step == 2) engine.begin_save(root, {});
    if (step > 2 && engine.save_progress()) ++beside.steps;
    if (step == 5) beside.saved = engine.finish_save();
  };
  const SlowWrites slow(wait);
  beside.at_end = run_toy(config, options).state;
  return beside;
}

// The function trains with the options `options`, and begins a save after step 2. Returns the
// checkpoint. The function expects that the states of steps 2 and 5 equal those of the oracle. If
// the machine is so busy that no step overtakes the save, the function repeats everything with
// slower writes. With a durable store, there is only one try.
inline SavedCheckpoint expect_exact(const Config& config, ToyOptions options,
                                    const std::string& root) {
  options.steps = 2;
  const StateBytes then = toy_oracle(config, options).state;
  options.steps = 5;
  const StateBytes at_end = toy_oracle(config, options).state;
  Beside beside;
  std::string folder = root;
  for (int tried = 0; tried < 4; ++tried) {
    if (tried > 0) folder = root + "/again" + std::to_string(tried);
    beside = save_beside(config, options, folder, kSlow * (1 << 2 * tried));
    EXPECT_TRUE(beside.at_end == at_end);
    if (beside.steps > 0 || !config.storage.state.name.empty()) break;
  }
  if (config.storage.state.name.empty()) {
    EXPECT_GE(beside.steps, 1u) << "no step ran beside the save";
  }
  EXPECT_TRUE(beside.saved.has_value());
  if (!beside.saved) return {};
  EXPECT_EQ(beside.saved->path, folder + "/step-000000002");
  EXPECT_EQ(beside.saved->step, 2u);
  EXPECT_GT(beside.saved->duration_ns, beside.saved->blocked_ns);
  EXPECT_TRUE(state_in(beside.saved->path, config, options) == then);
  return *beside.saved;
}

}  // namespace sluice::test
