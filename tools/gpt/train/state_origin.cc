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
#include "engine/checkpoint/store_source.h"
#include "engine/checkpoint/universal_source.h"
#include "tools/gpt/train/model_file.h"

namespace sluice {
namespace {

constexpr std::string_view kStore = "store:";

bool is_checkpoint(const std::string& folder) {
  std::error_code error;
  return std::filesystem::exists(folder + "/" + std::string(kManifestName), error) ||
         universal_parameters(folder).has_value();
}

// By form alone: reading them says what is wrong with them.
bool has_weights(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) ||
         std::filesystem::exists(path + "/model.safetensors.index.json", error) ||
         std::filesystem::exists(path + "/model.safetensors", error);
}

// A copy that was cut has weights with an index, too. Its moments, or its name, tell it from a
// model's weights.
bool is_part_of_checkpoint(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  if (checkpoint_name_from(fs::canonical(path, error).filename().string())) return true;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    if (entries->path().filename().string().starts_with("optimizer-")) return true;
  }
  return false;
}

void require_no_part(const std::string& path) {
  if (!is_part_of_checkpoint(path)) return;
  throw Error(ErrorCode::kDamaged,
              fmt::format("\"{}\" is a part of a checkpoint: {} is missing; copy the checkpoint "
                          "again, or name another one (to begin with its weights alone, copy its "
                          "model* files to a folder of another name)",
                          path, kManifestName));
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

OpenCheckpoint open_store(const std::string& name, CheckpointPrecision precision,
                          const Config::Storage& storage, const std::string& job) {
  if (!name.empty() && name == storage.state.name)
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}{}\" is the store of the config itself (storage.state.name), which "
                    "--resume goes on with; choose another name for the new one",
                    kStore, name));
  auto source = std::make_unique<StoreSource>(name, storage.paths, precision, job);
  std::vector<std::string> application = source->application();
  return {.source = std::move(source), .application = std::move(application)};
}

}  // namespace

std::string store_in(const std::string& text) {
  return text.starts_with(kStore) ? text.substr(kStore.size()) : "";
}

bool is_weights_alone(const std::string& path) {
  return !is_checkpoint(path) && has_weights(path) && !is_part_of_checkpoint(path);
}

std::string state_origin_in(const std::string& folder) {
  if (folder.starts_with(kStore)) return folder;
  if (is_checkpoint(folder)) return folder;
  std::error_code error;
  if (std::filesystem::is_regular_file(folder, error)) return folder;
  const std::vector<CheckpointName> names = list_checkpoints(folder);
  if (!names.empty()) return folder + "/" + names[0].text();
  require_no_part(folder);
  if (has_weights(folder)) return folder;
  throw Error(
      ErrorCode::kInput,
      fmt::format("\"{}\" is no checkpoint, and there is none in it, and no model's weights "
                  "(.safetensors) either; `sluice train --checkpoint` and `sluice state "
                  "export` write checkpoints",
                  folder));
}

OpenCheckpoint open_state_origin(const std::string& origin, CheckpointPrecision precision,
                                 const TrainConfig& config, const std::string& job) {
  if (origin.starts_with(kStore))
    return open_store(store_in(origin), precision, config.engine.storage, job);
  if (is_checkpoint(origin)) return open_checkpoint(origin, precision);
  require_no_part(origin);
  if (!has_weights(origin)) return open_checkpoint(origin, precision);
  return {.source = std::make_unique<WeightsSource>(origin, config.model), .application = {}};
}

}  // namespace sluice
