#include "tools/zoo/model_zoo.h"

#include <filesystem>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "tools/zoo/model_presets.h"
#include "tools/zoo/zoo_readers.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr double kParametersMax = 1e15;

double elements_of(const UnitSpec& unit) {
  double elements = 0;
  for (const TensorSpec& tensor : unit.tensors)
    elements += static_cast<double>(tensor.element_count());
  return elements;
}

// Returns the elements that a token uses.
double append(ZooModel& model, UnitBuilder unit) {
  const double idle = unit.idle_elements();
  model.spec.units.push_back(unit.take());
  const double active = elements_of(model.spec.units.back()) - idle;
  model.active_parameters += active;
  return active;
}

// A tied head is one more use of the unit with the embedding.
void set_orders(ZooModel& model) {
  if (!model.has_tied_head || !model.spec.forward_order.empty()) return;
  auto& order = model.spec.forward_order;
  std::uint32_t embedding = 0;
  for (std::uint32_t i = 0; i < model.spec.units.size(); ++i) {
    order.push_back(UnitId{i});
    for (const TensorSpec& tensor : model.spec.units[i].tensors) {
      if (tensor.name != model.tied.front()) continue;
      embedding = i;
      // One of its two uses is a product.
      model.work[i].product_elements = static_cast<double>(tensor.element_count()) / 2;
    }
  }
  order.push_back(UnitId{embedding});
  model.spec.backward_order.assign(order.rbegin(), order.rend());
}

// The folder or file that has tensors, if `path` is or has one.
std::string tensors_at(const std::string& path) {
  const fs::path place(path);
  if (place.filename() == "model.safetensors.index.json")
    return place.has_parent_path() ? place.parent_path().string() : ".";
  if (place.extension() == ".safetensors") return path;
  const fs::path folder = fs::is_directory(place) ? place : place.parent_path();
  for (const char* name : {"model.safetensors.index.json", "model.safetensors"})
    if (fs::exists(folder / name)) return folder.empty() ? "." : folder.string();
  return "";
}

bool is_tensor_file(const std::string& path) {
  const fs::path place(path);
  return place.extension() == ".safetensors" || place.filename() == "model.safetensors.index.json";
}

std::optional<ZooModel> read_known(const ConfigJson& config) {
  const std::string type = config.architecture();
  std::optional<ZooModel> model = read_decoder(config, type);
  if (!model) model = read_other_transformer(config, type);
  if (model) model->architecture = type;
  return model;
}

ZooModel read_any(const std::string& path) {
  if (!fs::exists(path)) {
    if (const std::optional<ConfigJson> preset = model_preset(path)) return *read_known(*preset);
    if (path.find('/') == std::string::npos)
      throw Error(ErrorCode::kInput,
                  fmt::format("--model \"{}\" is neither a file or folder, nor a model that plans "
                              "know by name; they know {}",
                              path, model_preset_names()));
  }
  const std::string tensors = tensors_at(path);
  const fs::path folder = is_tensor_file(path) ? fs::path(path).parent_path() : fs::path(path);
  std::unique_ptr<ConfigJson> config;
  if (!is_tensor_file(path) || fs::exists(folder / "config.json")) {
    const bool has_config = !fs::is_directory(folder) || fs::exists(folder / "config.json");
    if (!has_config && tensors.empty())
      throw Error(ErrorCode::kInput,
                  fmt::format("--model \"{}\" is a folder without a config.json and without "
                              "safetensors files; name the folder of a model",
                              path));
    if (has_config || tensors.empty())
      config = std::make_unique<ConfigJson>(is_tensor_file(path) ? (folder / "config.json").string()
                                                                 : path);
  }
  const bool has_type = config != nullptr && (config->has("model_type") || tensors.empty());
  if (!is_tensor_file(path) && has_type) {
    if (std::optional<ZooModel> model = read_known(*config)) return std::move(*model);
    if (tensors.empty())
      config->fail(fmt::format(
          "\"model_type\" is \"{}\", but plans know llama, mistral, qwen2, qwen3, mixtral, "
          "qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, gpt2, t5, "
          "whisper and vit; others are read from their safetensors files in the same folder, or "
          "--parameters and --layers come near",
          config->architecture()));
  }
  ZooModel model = read_tensor_files(tensors, config.get());
  model.architecture =
      (config != nullptr ? config->text_or("model_type", "a model") : std::string("a model")) +
      ", from its tensors";
  return model;
}

}  // namespace

double ZooModel::parameters() const {
  double elements = 0;
  for (const UnitSpec& unit : spec.units) elements += elements_of(unit);
  return elements;
}

void add_unit(ZooModel& model, UnitBuilder unit, std::uint64_t attention_width,
              double fixed_tokens) {
  const double active = append(model, std::move(unit));
  model.work.push_back({.product_elements = active,
                        .attention_width = attention_width,
                        .fixed_tokens = fixed_tokens});
}

void add_lookup(ZooModel& model, UnitBuilder unit) {
  (void)append(model, std::move(unit));
  model.work.emplace_back();
}

ZooModel read_zoo_model(const std::string& path) {
  ZooModel model = read_any(path);
  if (model.parameters() >= kParametersMax)
    throw Error(ErrorCode::kConfig,
                fmt::format("\"{}\" has {:.3g} parameters, but plans are made for fewer than {:g}",
                            path, model.parameters(), kParametersMax));
  set_orders(model);
  return model;
}

}  // namespace sluice
