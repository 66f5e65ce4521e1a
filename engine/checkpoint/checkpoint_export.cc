#include "engine/checkpoint/checkpoint_export.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <sluice/dtype.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/optimizer_math.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/plan/layout.h"
#include "engine/ranks/ranks.h"

namespace sluice {
namespace {

// Rounds as an engine does that gets the masters.
void round_to(DType type, std::span<const float> masters, std::span<std::byte> target) {
  if (type == DType::kFp32) {
    std::memcpy(target.data(), masters.data(), target.size());
    return;
  }
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const std::uint16_t half =
        type == DType::kBf16 ? split_master(masters[i]).high : fp16_from_float(masters[i]);
    std::memcpy(target.data() + i * sizeof half, &half, sizeof half);
  }
}

}  // namespace

SavedCheckpoint export_checkpoint(StateSource& source, const ModelSpec& given_model,
                                  const Config& config, const std::string& root,
                                  const SaveOptions& options,
                                  const std::vector<std::string>& application) {
  const ModelSpec model = validated(given_model);
  const DType type = config.precision.parameters;
  const StateDescription description =
      describe_state(model, type, config.optimizer.kind, config.optimizer.state);
  source.prepare(description);
  const Layout layout(model, state_format(config), config.storage.block_elements);
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Ranks ranks({}, nullptr, *device);
  std::vector<float> values;
  const auto read = [&](TensorId id, StateKind kind, std::uint64_t first,
                        std::span<std::byte> target) {
    const bool is_rounded = kind == StateKind::kParameter;
    values.resize(target.size() / (is_rounded ? size_of(type) : sizeof(float)));
    source.read(layout.tensor(id), is_rounded ? StateKind::kMaster : kind, first, values);
    round_to(is_rounded ? type : DType::kFp32, values, target);
  };
  SaveOptions all = options;
  all.hyperparameters.merge(hyperparameters_of(config.optimizer));
  return CheckpointWriter(layout, description, read, ranks)
      .save(root, source.position(), all, application);
}

}  // namespace sluice
