// A small GPT in an engine on the host device, for tests of tools that use an engine. The GPT has a
// few thousand parameters. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/train/train_config.h"

namespace sluice::test {

inline gpt::GptConfig small_gpt() {
  return {.layers = 2, .heads = 2, .embedding = 32, .context = 8, .vocabulary = 256};
}

// Returns a config with all state on storage in `folder`.
inline TrainConfig small_train_config(const std::string& folder, DType precision) {
  TrainConfig config;
  config.model = small_gpt();
  config.engine.precision = {.parameters = precision, .gradients = precision};
  config.engine.memory = {.device_bytes = 8_MiB, .host_bytes = 8_MiB};
  config.engine.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.engine.storage.paths = {folder};
  config.engine.storage.block_elements = 4096;
  config.engine.threads = 2;
  config.sequences = 2;
  config.warmup_steps = 0;
  return config;
}

class SmallGpt {
 public:
  explicit SmallGpt(TrainConfig config, const QueueDecorator& decorate = {})
      : config_(std::move(config)),
        model_(validated(training_model(config_))),
        device_(make_host_device({.memory_bytes = 8_MiB})),
        engine_(EngineOverQueue::make(config_.engine, model_, *device_, decorate)) {}

  Engine& engine() { return engine_; }
  HostDevice& device() { return *device_; }
  const TrainConfig& config() const { return config_; }
  const ModelSpec& model() const { return model_; }

  // The initial values are the same as in `sluice train`.
  InitialValues initial_values() const {
    return [this](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
      for (const UnitSpec& unit : model_.units) {
        for (const TensorSpec& spec : unit.tensors) {
          if (spec.name == tensor.name)
            gpt::fill_initial_values(config_.model, config_.seed, spec, first, values);
        }
      }
    };
  }

  std::vector<std::byte> read(TensorId tensor, StateKind kind) {
    const std::uint64_t element_bytes = kind == StateKind::kParameter
                                            ? layout_of(engine_).format().parameter_bytes()
                                            : sizeof(float);
    std::vector<std::byte> bytes(engine_.tensors()[index_of(tensor)].element_count * element_bytes);
    engine_.read_state(tensor, kind, 0, bytes);
    return bytes;
  }

 private:
  TrainConfig config_;
  ModelSpec model_;
  std::unique_ptr<HostDevice> device_;
  Engine engine_;
};

}  // namespace sluice::test
