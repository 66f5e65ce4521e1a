// An engine with a durable store, the folder of the store, and the toy model that the engine
// trains.
// Thread rule: only the test's thread may use the engine.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/units.h>
#include "tests/engine/exactness_cases.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {

inline constexpr std::size_t kCaseCount = std::size(kCases);

class DurableEngine : public testing::Test {
 protected:
  DurableEngine() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      std::filesystem::create_directory(paths_.back());
    }
  }

  Config config(const Case& placement, OverlapPolicy policy, std::uint32_t commit_every) const {
    Config config = toy_config(paths_[0]);
    placement.change(config);
    if (config.memory.host_bytes) *config.memory.host_bytes += 200_KiB;  // commit buffers
    config.storage.block_elements = 4096;
    config.storage.paths = paths_;
    config.storage.state = {.name = "run-7", .commit_every = commit_every};
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = 0;  // so that tests may use every policy
    return config;
  }
  Config config() const { return config(kCases[4], OverlapPolicy::kDeferred, 1); }

  struct Run {
    explicit Run(const Config& config, bool is_gpu = false, const ToyOptions& options = {})
        : model(toy_model(options.frozen_units)),
          device(make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                   .has_own_memory = is_gpu})),
          engine(std::in_place, config, model, *device) {}
    ModelSpec model;
    std::unique_ptr<HostDevice> device;
    std::optional<Engine> engine;
  };

  ToyResult run(const Config& config, const ToyOptions& options, bool is_gpu = false,
                bool closes = true) {
    Run run(config, is_gpu, options);
    ToyResult result = run_toy(*run.engine, run.model, *run.device, config, options);
    if (closes) run.engine->close();
    return result;
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

}  // namespace sluice::test
