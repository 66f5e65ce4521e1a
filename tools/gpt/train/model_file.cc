#include "tools/gpt/train/model_file.h"

#include <charconv>

#include <fmt/format.h>

#include <sluice/error.h>
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

constexpr std::uint32_t kPublishedHeadWidth = 64;
const std::string kHead = "lm_head.weight";  // beside the transformer, not in it

// The keys of section "model", in the file's metadata as "model.layers" and so on.
std::map<std::string, std::string> metadata_of(const gpt::GptConfig& config) {
  return {{"model.layers", std::to_string(config.layers)},
          {"model.heads", std::to_string(config.heads)},
          {"model.embedding", std::to_string(config.embedding)},
          {"model.context", std::to_string(config.context)},
          {"model.vocabulary", std::to_string(config.vocabulary)},
          {"model.tied_head", config.tied_head ? "true" : "false"}};
}

}  // namespace

void save_model(OutputFile& output, const gpt::GptConfig& config, Engine& engine) {
  std::vector<SavedTensor> tensors;
  for (const UnitSpec& unit : gpt::gpt_model_spec(config).units) {
    for (const TensorSpec& tensor : unit.tensors)
      tensors.push_back({.name = tensor.name, .shape = tensor.shape});
  }
  const auto read = [&](std::size_t index, std::uint64_t first, std::span<float> values) {
    engine.read_state(TensorId{static_cast<std::uint32_t>(index)}, StateKind::kMaster, first,
                      std::as_writable_bytes(values));
  };
  if (engine.rank() != 0) return read_as_if_written(tensors, read);
  write_safetensors(output, tensors, metadata_of(config), read);
}

ModelFile::ModelFile(const std::string& path)
    : file_(path), prefix_(find_prefix()), config_(read_config()) {
  check_tensors();
}

// Files of Hugging Face's GPT2LMHeadModel.save_pretrained() have a prefix; a published GPT-2 has
// none.
std::string ModelFile::find_prefix() const {
  const bool has_prefix =
      file_.find("wte.weight") == nullptr && file_.find("transformer.wte.weight") != nullptr;
  return has_prefix ? "transformer." : "";
}

std::string ModelFile::name_in_file(const std::string& tensor) const {
  return tensor == kHead ? tensor : prefix_ + tensor;
}

const std::vector<std::uint64_t>& ModelFile::shape(const std::string& tensor) const {
  return file_.shape(name_in_file(tensor));
}

void ModelFile::read(const std::string& tensor, std::uint64_t first_element,
                     std::span<float> values) const {
  file_.read(name_in_file(tensor), first_element, values);
}

gpt::GptConfig ModelFile::read_config() const {
  gpt::GptConfig config =
      file_.metadata().contains("model.layers") ? config_from_metadata() : config_from_shapes();
  config.tied_head = file_.find(kHead) == nullptr;
  try {
    gpt::validate(config);
  } catch (const Error& error) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no usable GPT: {}", file_.path(), error.what()));
  }
  return config;
}

gpt::GptConfig ModelFile::config_from_metadata() const {
  const auto integer = [&](const std::string& key) {
    const auto found = file_.metadata().find(key);
    std::uint32_t value = 0;
    if (found != file_.metadata().end()) {
      const std::string& text = found->second;
      const char* end = text.data() + text.size();
      const auto parsed = std::from_chars(text.data(), end, value);
      if (parsed.ec == std::errc{} && parsed.ptr == end) return value;
    }
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\": its metadata has no number \"{}\"", file_.path(), key));
  };
  return {.layers = integer("model.layers"),
          .heads = integer("model.heads"),
          .embedding = integer("model.embedding"),
          .context = integer("model.context"),
          .vocabulary = integer("model.vocabulary")};
}

gpt::GptConfig ModelFile::config_from_shapes() const {
  const auto& embedding = shape("wte.weight");
  const auto& positions = shape("wpe.weight");
  if (embedding.size() != 2 || positions.size() != 2)
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\": wte.weight and wpe.weight must be matrices", file_.path()));
  gpt::GptConfig config;
  config.vocabulary = static_cast<std::uint32_t>(embedding[0]);
  config.embedding = static_cast<std::uint32_t>(embedding[1]);
  config.context = static_cast<std::uint32_t>(positions[0]);
  config.heads = std::max(1u, config.embedding / kPublishedHeadWidth);
  config.layers = 0;
  while (file_.has(name_in_file(fmt::format("h.{}.ln_1.weight", config.layers)))) ++config.layers;
  return config;
}

void ModelFile::check_tensors() const {
  for (const UnitSpec& unit : gpt::gpt_model_spec(config_).units) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (shape(tensor.name) == tensor.shape) continue;
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\": tensor \"{}\" has shape [{}], but the model needs [{}]",
                              file_.path(), name_in_file(tensor.name),
                              fmt::join(shape(tensor.name), ", "), fmt::join(tensor.shape, ", ")));
    }
  }
}

void ModelFile::require_shape_of(const gpt::GptConfig& config) const {
  const auto wanted = metadata_of(config);
  for (const auto& [key, value] : metadata_of(config_)) {
    if (wanted.at(key) != value)
      throw Error(ErrorCode::kInput, fmt::format("\"{}\" has {} = {}, but the config says {}",
                                                 file_.path(), key, value, wanted.at(key)));
  }
}

InitialValues ModelFile::initial_values() const {
  return [this](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    read(tensor.name, first, values);
  };
}

}  // namespace sluice
