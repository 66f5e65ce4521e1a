#include "tools/gpt/train/model_file.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/error.h>
#include "base/untrusted_json.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

constexpr std::uint32_t kPublishedHeadWidth = 64;
const std::string kHead = "lm_head.weight";  // beside the transformer, not in it
const std::string kHeadsKey = "model.heads";
const std::string kInner = "transformer.";
const std::string kEmbedding = "wte.weight";
constexpr double kLayerNormEpsilon = 1e-5;  // as in tools/gpt/model/row_kernels.cc
constexpr std::uint32_t kGpt2EndOfText = 50256;
constexpr std::uint64_t kCompareElements = 64 << 10;

// The keys of section "model", in the file's metadata as "model.layers" and so on.
std::map<std::string, std::string> metadata_of(const gpt::GptConfig& config) {
  return {{"model.layers", std::to_string(config.layers)},
          {kHeadsKey, std::to_string(config.heads)},
          {"model.embedding", std::to_string(config.embedding)},
          {"model.context", std::to_string(config.context)},
          {"model.vocabulary", std::to_string(config.vocabulary)},
          {"model.tied_head", config.tied_head ? "true" : "false"}};
}

}  // namespace

std::string gpt2_config_text(const gpt::GptConfig& model) {
  nlohmann::ordered_json document{{"architectures", {"GPT2LMHeadModel"}},
                                  {"model_type", "gpt2"},
                                  {"activation_function", "gelu_new"},
                                  {"n_layer", model.layers},
                                  {"n_head", model.heads},
                                  {"n_embd", model.embedding},
                                  {"n_positions", model.context},
                                  {"n_ctx", model.context},
                                  {"vocab_size", model.vocabulary},
                                  {"tie_word_embeddings", model.tied_head}};
  // Without these, transformers takes GPT-2's own token, which a smaller vocabulary lacks.
  if (model.vocabulary <= kGpt2EndOfText)
    document.update({{"bos_token_id", nullptr}, {"eos_token_id", nullptr}});
  return document.dump(2) + "\n";
}

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

// The config.json there may be of something else, such as one of Sluice. Why it cannot be read is
// for those who need it: a file with metadata does not.
std::string config_beside(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return {};
  std::string config = (std::filesystem::path(path).parent_path() / "config.json").string();
  if (!std::filesystem::is_regular_file(config, error)) return {};
  std::string text;
  try {
    text = ConfigDocument::text_of_file(config);
  } catch (const Error&) {
    return config;
  }
  const auto values = parse_untrusted_json<nlohmann::json>(text);
  // One that is cut is named by those who need it.
  if (!nlohmann::json::accept(text, /*ignore_comments=*/true)) return config;
  return values.is_object() && values.contains("model_type") ? config : std::string();
}

std::unique_ptr<ModelFile> ModelFile::open(const std::string& path, const gpt::GptConfig& config) {
  if (path.empty()) return nullptr;
  auto file = std::make_unique<ModelFile>(path);
  file->require_shape_of(config);
  return file;
}

ModelFile::ModelFile(const std::string& path)
    : file_(path),
      prefix_(find_prefix()),
      config_file_(find_config_file()),
      config_(read_config()) {
  check_tensors();
}

// The prefix of the names: nothing in a published GPT-2, "transformer." where Hugging Face's
// GPT2LMHeadModel wrote it, "module.transformer." where that was inside of another module.
std::string ModelFile::find_prefix() const {
  std::vector<std::string> prefixes;
  for (const std::string& name : file_.names()) {
    if (name == kEmbedding || name.ends_with("." + kEmbedding))
      prefixes.push_back(name.substr(0, name.size() - kEmbedding.size()));
  }
  if (prefixes.size() > 1)
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has several models, with \"{}{}\" and \"{}{}\"", file_.path(),
                            prefixes[0], kEmbedding, prefixes[1], kEmbedding));
  return prefixes.empty() ? "" : prefixes[0];
}

std::string ModelFile::name_in_file(const std::string& tensor) const {
  if (tensor != kHead) return prefix_ + tensor;
  const bool is_inside = prefix_.ends_with(kInner);
  return (is_inside ? prefix_.substr(0, prefix_.size() - kInner.size()) : prefix_) + tensor;
}

const std::vector<std::uint64_t>& ModelFile::shape(const std::string& tensor) const {
  const std::string name = name_in_file(tensor);
  const SafetensorsTensor* const found = file_.find(name);
  if (found == nullptr)
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" has no tensor \"{}\"", file_.path(), name));
  if (found->dtype != "F32" && found->dtype != "BF16" && found->dtype != "F16")
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\": tensor \"{}\" is of type \"{}\", expected F32, BF16 or F16",
                            file_.path(), name, found->dtype));
  return found->shape;
}

void ModelFile::read(const std::string& tensor, std::uint64_t first_element,
                     std::span<float> values) const {
  file_.read(name_in_file(tensor), first_element, values);
}

gpt::GptConfig ModelFile::read_config() const {
  gpt::GptConfig config = has_metadata()         ? config_from_metadata()
                          : config_file_.empty() ? config_from_shapes()
                                                 : config_from_file();
  config.tied_head = is_head_tied(config.tied_head);
  try {
    gpt::validate(config);
  } catch (const Error& error) {
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" is no usable GPT: {}{}", file_.path(), error.what(),
                    has_guessed_heads() ? "; no config.json says how many heads it has" : ""));
  }
  return config;
}

bool ModelFile::has_metadata() const {
  return file_.metadata().contains("model.layers");
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
  while (file_.find(name_in_file(fmt::format("h.{}.ln_1.weight", config.layers))) != nullptr)
    ++config.layers;
  return config;
}

// Empty: there is none.
std::string ModelFile::find_config_file() const {
  if (has_metadata()) return {};
  if (!file_.is_folder()) return config_beside(file_.path());
  const std::string path = file_.path() + "/config.json";
  std::error_code error;
  return std::filesystem::exists(path, error) ? path : std::string();
}

// As transformers describes a GPT-2.
gpt::GptConfig ModelFile::config_from_file() const {
  const std::string& path = config_file_;
  const auto values = parse_untrusted_json<nlohmann::json>(ConfigDocument::text_of_file(path));
  if (values.is_discarded())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no JSON; it is cut or damaged, so copy it anew", path));
  const auto fail = [&](const std::string& key, const std::string& expected) {
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\": field \"{}\" is {}, expected {}", path, key,
                    values.is_object() && values.contains(key) ? values[key].dump() : "missing",
                    expected));
  };
  if (!values.is_object() || !values.contains("model_type") || values["model_type"] != "gpt2")
    fail("model_type", "\"gpt2\"");
  const auto integer = [&](const char* key) {
    const bool is_number = values.contains(key) && values[key].is_number_unsigned();
    if (!is_number || values[key].get<std::uint64_t>() > std::numeric_limits<std::uint32_t>::max())
      fail(key, "a whole number");
    return values[key].get<std::uint32_t>();
  };
  // Fields that change what is computed. Where one is missing, transformers takes these values.
  using nlohmann::json;
  const std::vector<std::pair<const char*, std::vector<json>>> computed = {
      {"activation_function", {"gelu_new", "gelu_pytorch_tanh"}},
      {"layer_norm_epsilon", {kLayerNormEpsilon}},
      {"scale_attn_weights", {true}},
      {"scale_attn_by_inverse_layer_idx", {false}},
      {"add_cross_attention", {false}},
  };
  for (const auto& [key, known] : computed)
    if (values.contains(key) && std::ranges::find(known, values[key]) == known.end())
      fail(key, fmt::format("{}: this program computes no other model", known[0].dump()));
  const auto tied = values.find("tie_word_embeddings");
  return {.layers = integer("n_layer"),
          .heads = integer("n_head"),
          .embedding = integer("n_embd"),
          .context = integer("n_positions"),
          .vocabulary = integer("vocab_size"),
          .tied_head = tied == values.end() || *tied != false};
}

// A model whose head is tied may have it under both names.
bool ModelFile::is_head_tied(bool says_tied) const {
  if (file_.find(name_in_file(kHead)) == nullptr) return true;
  if (has_metadata() || !says_tied) return false;
  if (head_equals_embedding()) return true;
  if (config_file_.empty()) return false;  // nothing has said that it is tied
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\": config.json ties the head to the embedding, but \"{}\" and "
                          "\"{}\" differ; set \"tie_word_embeddings\" to false there if the head "
                          "is one of its own",
                          file_.path(), name_in_file(kHead), name_in_file(kEmbedding)));
}

bool ModelFile::head_equals_embedding() const {
  if (shape(kHead) != shape(kEmbedding)) return false;
  std::vector<float> own(kCompareElements), other(kCompareElements);
  const std::uint64_t count = file_.find(name_in_file(kHead))->element_count();
  for (std::uint64_t at = 0; at < count; at += kCompareElements) {
    const std::uint64_t piece = std::min(kCompareElements, count - at);
    read(kHead, at, std::span(own).first(piece));
    read(kEmbedding, at, std::span(other).first(piece));
    if (std::memcmp(own.data(), other.data(), piece * sizeof(float)) != 0) return false;
  }
  return true;
}

void ModelFile::check_tensors() const {
  for (const UnitSpec& unit : gpt::gpt_model_spec(config_).units) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (shape(tensor.name) == tensor.shape) continue;
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\": tensor \"{}\" has shape [{}], but the model needs [{}]{}",
                              file_.path(), name_in_file(tensor.name),
                              fmt::join(shape(tensor.name), ", "), fmt::join(tensor.shape, ", "),
                              config_file_.empty() ? "" : " by \"" + config_file_ + "\""));
    }
  }
}

bool ModelFile::has_guessed_heads() const {
  return !has_metadata() && config_file_.empty();
}

std::string ModelFile::guess_of_heads() const {
  return fmt::format(
      "\"{}\" does not say how many heads it has, and it has no config.json; {} = {}, "
      "with {} elements each, is a guess",
      file_.path(), kHeadsKey, config_.heads, config_.head_width());
}

void ModelFile::require_shape_of(const gpt::GptConfig& config) const {
  const auto wanted = metadata_of(config);
  for (const auto& [key, value] : metadata_of(config_)) {
    if (wanted.at(key) == value) continue;
    if (key == kHeadsKey && has_guessed_heads())
      throw Error(ErrorCode::kInput, fmt::format("{}; the config says {}; put the model's "
                                                 "config.json beside it",
                                                 guess_of_heads(), wanted.at(key)));
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
