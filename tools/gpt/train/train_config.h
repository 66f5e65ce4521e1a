// The config of `sluice train`. The config contains the engine's config, and values from five
// sections of a config file: model, data, batch, optimizer and run. The section optimizer gives the
// schedule of the learning rate. The structs are plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/config/learning_rate.h"
#include "tools/gpt/model/activations.h"
#include "tools/gpt/model/gpt_config.h"
#include "tools/gpt/model/matmul_choice.h"

namespace sluice {

// The device that computes. With kAuto, a GPU computes if a suitable GPU is available.
enum class DeviceChoice : std::uint8_t { kAuto, kCuda, kHost };

enum class TokenFormat : std::uint8_t { kAuto, kBytes, kUint16, kUint32 };

struct TrainConfig : LearningRateOptions {
  Config engine;
  gpt::GptConfig model;
  std::string data_file;
  std::string text_file;  // the text from which data_file was made; empty = data_file
  std::string tokenizer;  // a file or folder; empty = one token per byte, or a token file
  TokenFormat data_format = TokenFormat::kAuto;
  double validation_fraction = 0.05;
  std::uint32_t sequences = 8;  // in one micro-batch
  std::uint32_t micro_batches = 1;
  // If there is no value, the order is "auto". resolve_order() replaces "auto" with an order.
  std::optional<MicroBatchOrder> order;
  DeviceChoice device = DeviceChoice::kAuto;
  gpt::MatmulWish matmul;  // on the host
  std::uint64_t seed = 1;
  std::string trace_file;              // empty = none
  std::uint64_t trace_ring_bytes = 0;  // of each thread
  bool trace_nvtx = false;
  bool has_status = true;  // a page for `sluice top` (engine/run/status_page.h)
};

// Fails with kConfig if values contradict each other. The message names the place in the file.
TrainConfig train_config(const ConfigDocument& document);

// The number of micro-batches that are under way at the same time.
std::uint32_t micro_batches_at_once(const TrainConfig& config);
// Returns kNone if the computation keeps all values between the forward pass and the backward pass.
// Returns kUnits if the engine keeps the values that cross from unit to unit.
gpt::Checkpoints checkpoints_of(const TrainConfig& config);

// Returns the description of the model for the engine. If the engine keeps the values that cross
// from unit to unit, the model also describes these values. On the host, values between units are
// fp32. On a GPU, values between units have the type of the parameters.
ModelSpec training_model(const TrainConfig& config, bool is_on_host = true);

// If `config.order` is "auto", the function chooses the order. The function then gives the order in
// `config.order` to the engine's activations. Ranks with the same config and machine get the same
// result.
void resolve_order(TrainConfig& config, const RunMachine& machine);

}  // namespace sluice
