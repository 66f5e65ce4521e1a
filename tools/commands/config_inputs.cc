#include "tools/commands/config_inputs.h"

#include <set>
#include <span>
#include <vector>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/error.h>
#include "engine/store/store_files.h"
#include "engine/store/store_survey.h"
#include "tools/gpt/text/tokenizer_file.h"

namespace sluice {
namespace {

void add_store(OutputFiles& files, const std::vector<std::string>& paths, const std::string& name) {
  const std::string role = fmt::format("the store \"{}\"", name);
  for (const std::string& path : paths) {
    files.add_input(role, path + "/" + name + ".lock");
    try {
      for (const StorePath::File& file : look_at_path(path, name).files)
        files.add_input(role, path + "/" + file.name);
    } catch (const Error&) {
      // A path that cannot be read is refused where the store is opened.
    }
  }
}

void add_stores(OutputFiles& files, const Config::Storage& storage) {
  std::set<std::string> names;
  if (!storage.state.name.empty()) names.insert(storage.state.name);
  for (const std::string& path : storage.paths) {
    try {
      for (const std::string& name : store_names(std::span(&path, 1))) names.insert(name);
    } catch (const Error&) {
      // A plan is also made for the paths of another machine.
    }
  }
  for (const std::string& name : names) add_store(files, storage.paths, name);
}

struct NamedFiles {
  const std::string& config;
  const std::string& text;
  const std::string& tokenizer;
};

void add_named(OutputFiles& files, const NamedFiles& named, const Config::Storage& storage) {
  files.add_input("the config", named.config);
  files.add_input("the text", named.text);
  add_tokenizer_inputs(files, "the tokenizer", named.tokenizer);
  files.add_input("storage.calibration", storage.calibration);
  add_stores(files, storage);
}

}  // namespace

void add_config_inputs(OutputFiles& files, const std::string& config_file,
                       const ConfigDocument& config) {
  const std::string text = config.string("data.file");
  const std::string tokenizer = config.string("data.tokenizer");
  add_named(files, {.config = config_file, .text = text, .tokenizer = tokenizer},
            engine_config(config).storage);
}

void add_config_inputs(OutputFiles& files, const std::string& config_file,
                       const TrainConfig& config) {
  add_named(files, {.config = config_file, .text = config.data_file, .tokenizer = config.tokenizer},
            config.engine.storage);
}

void add_tokenizer_inputs(OutputFiles& files, const std::string& what, const std::string& path) {
  files.add_input(what, path);
  files.add_input(what, merges_beside(path));
}

void compare_with_tokens(OutputFiles& files, const TrainConfig& config) {
  if (config.text_file.empty()) return;
  files.add_input("the tokens", config.data_file);
  files.compare();
}

}  // namespace sluice
