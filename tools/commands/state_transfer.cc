#include "tools/commands/state_transfer.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_export.h"
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/store_source.h"
#include "engine/durable/new_store.h"
#include "engine/plan/sharding.h"
#include "engine/store/store_survey.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/json_text.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/train/checkpointing.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/run_settings.h"
#include "tools/gpt/train/state_origin.h"
#include "tools/gpt/train/tokenized_data.h"
#include "tools/gpt/train/train_config.h"
#include "tools/report/sha256.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

bool has_tensors_of(const StateDescription& state, const ModelSpec& model) {
  const StateDescription wanted =
      describe_state(model, state.parameter, state.optimizer, state.moments);
  return std::ranges::equal(state.tensors, wanted.tensors, [](const auto& own, const auto& other) {
    return own.name == other.name && own.shape == other.shape;
  });
}

// The config's shape with the store's heads, which tensors do not show.
gpt::GptConfig model_of(const StoreSource& source, const TrainConfig& config) {
  gpt::GptConfig model = config.model;
  const std::vector<std::string>& texts = source.application();
  const auto saved = texts.empty() ? std::nullopt : saved_setting(texts.front(), "model.heads");
  std::uint32_t heads = 0;
  if (saved) std::from_chars(saved->data(), saved->data() + saved->size(), heads);
  if (heads == 0 || heads == model.heads || model.embedding % heads != 0) return model;
  warn("sluice: the store has model.heads = {}, and so has the config.json; the config says {}\n",
       heads, model.heads);
  model.heads = heads;
  return model;
}

}  // namespace

ConfigDocument read_state_config(const StateOptions& options) {
  ConfigDocument document = ConfigDocument::from_file(options.config_file);
  for (const std::string& assignment : options.assignments) document.set(assignment);
  return document;
}

void require_store_name(const Config::Storage& storage, const StateOptions& options) {
  if (!storage.state.name.empty()) return;
  throw Error(ErrorCode::kInput,
              fmt::format("{} names no durable store; set storage.state.name, such as with "
                          "--set storage.state.name=run-7",
                          options.config_file));
}

StateJson::StateJson(const StateOptions& options, const ConfigDocument& config,
                     const std::string& checkpoint)
    : output_(files_.add("--json", options.json_file)) {
  if (!output_.is_wanted()) return;
  add_config_inputs(files_, options.config_file, config);
  files_.add_input("the checkpoint", checkpoint);
  if (checkpoint.empty()) files_.reserve("DIR", options.folder);
  files_.check();
}

void StateJson::write(const ordered_json& document) {
  if (output_.is_wanted()) write_whole(output_, json_text(document) + "\n");
}

int export_state(const StateOptions& options) {
  const ConfigDocument document = read_state_config(options);
  const TrainConfig config = train_config(document);
  const Config::Storage& storage = config.engine.storage;
  require_store_name(storage, options);
  StateJson json(options, document);
  StoreSource source(storage.state.name, storage.paths);
  const CheckpointLock lock(options.folder);
  for (const std::string& note : lock.notes()) warn("sluice: {}\n", note);
  SaveOptions save{.file_bytes_max = parse_size(options.shard_size)};
  if (options.has_sha256) save.sha256 = file_sha256;
  if (has_tensors_of(source.description(), training_model(config)))
    save.files = {{"config.json", gpt2_config_text(model_of(source, config))}};
  std::optional<Progress> progress(std::in_place, "exporting the store");
  const SavedCheckpoint saved = export_checkpoint(source, source.run().model, source.run().config,
                                                  options.folder, save, source.application());
  progress.reset();
  say("the store \"{}\" of {} rank{}, step {}, is now also \"{}\": {}\n", storage.state.name,
      source.run().ranks, source.run().ranks == 1 ? "" : "s", saved.step, saved.path,
      format_bytes(saved.size_bytes));
  for (const std::string& note : saved.notes) warn("sluice: {}\n", note);
  json.write({{"name", storage.state.name},
              {"ranks", source.run().ranks},
              {"step", saved.step},
              {"path", saved.path},
              {"bytes", saved.size_bytes}});
  return kExitOk;
}

int import_state(const StateOptions& options) {
  const ConfigDocument document = read_state_config(options);
  TrainConfig config = train_config(document);
  const Config::Storage& storage = config.engine.storage;
  require_store_name(storage, options);
  require_group_number(config.engine.sharding, options.ranks);
  const std::string folder = state_origin_in(options.folder);
  StateJson json(options, document, folder);
  OpenCheckpoint opened = open_state_origin(
      folder, options.converts ? CheckpointPrecision::kConvert : CheckpointPrecision::kAsSaved,
      config);
  if (opened.application.empty()) {
    settle_data_file(config, /*is_quiet=*/true);
    json.compare(config);
    opened.application = {application_for(config, options.ranks, opened.source->position().step)};
  }
  std::optional<Progress> progress(std::in_place, "making the store");
  const NewStore made = make_store(config.engine, training_model(config), options.ranks,
                                   *opened.source, opened.application);
  progress.reset();
  say("\"{}\" is now also the store \"{}\" of {} rank{}, step {}, in {}: {}\n", folder,
      storage.state.name, options.ranks, options.ranks == 1 ? "" : "s", made.step,
      fmt::join(storage.paths, ", "), format_bytes(made.size_bytes));
  json.write({{"name", storage.state.name},
              {"ranks", options.ranks},
              {"step", made.step},
              {"path", folder},
              {"paths", storage.paths},
              {"bytes", made.size_bytes}});
  return kExitOk;
}

}  // namespace sluice
