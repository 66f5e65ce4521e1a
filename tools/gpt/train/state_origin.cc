#include "tools/gpt/train/state_origin.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/safetensors.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_manifest.h"
#include "engine/checkpoint/universal_source.h"
#include "tools/gpt/train/model_file.h"

namespace sluice {
namespace {

bool is_checkpoint(const std::string& folder) {
  std::error_code error;
  return std::filesystem::exists(folder + "/" + std::string(kManifestName), error) ||
         universal_parameters(folder).has_value();
}

bool has_weights(const std::string& path) {
  try {
    return !SafetensorsReader(path).names().empty();
  } catch (const Error&) {
    return false;
  }
}

// A model's weights are the masters; the moments are zero.
class WeightsSource final : public StateSource {
 public:
  WeightsSource(const std::string& path, const gpt::GptConfig& model)
      : file_(path), values_(file_.initial_values()) {
    file_.require_shape_of(model);
  }

  StatePosition position() const override { return {}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    if (kind == StateKind::kMaster) return values_(tensor, first_element, values);
    std::ranges::fill(values, 0.0f);
  }

 private:
  const ModelFile file_;
  const InitialValues values_;
};

}  // namespace

std::string state_origin_in(const std::string& folder) {
  if (is_checkpoint(folder)) return folder;
  std::error_code error;
  const bool is_file = std::filesystem::is_regular_file(folder, error);
  const std::vector<CheckpointName> names =
      is_file ? std::vector<CheckpointName>() : list_checkpoints(folder);
  if (!names.empty()) return folder + "/" + names[0].text();
  if (has_weights(folder)) return folder;
  throw Error(
      ErrorCode::kInput,
      fmt::format("\"{}\" is no checkpoint, and there is none in it, and no model's weights "
                  "(.safetensors) either; `sluice train --checkpoint` and `sluice state "
                  "export` write checkpoints",
                  folder));
}

OpenCheckpoint open_state_origin(const std::string& folder, CheckpointPrecision precision,
                                 const gpt::GptConfig& model) {
  if (is_checkpoint(folder) || !has_weights(folder)) return open_checkpoint(folder, precision);
  return {.source = std::make_unique<WeightsSource>(folder, model), .application = {}};
}

}  // namespace sluice
