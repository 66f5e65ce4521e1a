#include "tools/zoo/model_zoo.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/error.h>

namespace sluice {
namespace {

using nlohmann::json;

// Far more than any model has, and few enough that no product of two overflows.
constexpr std::uint64_t kExtentMax = 1 << 28;
constexpr std::uint64_t kLayersMax = 100'000;

class ModelFile {
 public:
  explicit ModelFile(const std::string& argument) : path_(argument) {
    if (std::filesystem::is_directory(path_))
      path_ = (std::filesystem::path(path_) / "config.json");
    values_ = json::parse(ConfigDocument::text_of_file(path_), nullptr, /*allow_exceptions=*/false);
    if (!values_.is_object())
      throw Error(ErrorCode::kInput, fmt::format("\"{}\" is no JSON object; --model wants the "
                                                 "config.json of a model",
                                                 path_));
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorCode::kConfig, fmt::format("{}: {}", path_, why));
  }

  std::string architecture() const {
    const auto type = values_.find("model_type");
    if (type == values_.end() || !type->is_string()) fail("\"model_type\" is missing");
    return type->get<std::string>();
  }

  bool has(const char* key) const { return values_.contains(key) && !values_[key].is_null(); }

  std::uint64_t count(const char* key) const {
    if (!has(key)) fail(fmt::format("\"{}\" is missing", key));
    const json& value = values_[key];
    if (!value.is_number_unsigned() || value == 0 || value > kExtentMax)
      fail(fmt::format("\"{}\" is {}, but must be a number from 1 to {}", key, value.dump(),
                       kExtentMax));
    return value.get<std::uint64_t>();
  }

  std::uint64_t count_or(const char* key, std::uint64_t fallback) const {
    return has(key) ? count(key) : fallback;
  }

  bool flag(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!values_[key].is_boolean()) fail(fmt::format("\"{}\" is no boolean", key));
    return values_[key].get<bool>();
  }

 private:
  std::string path_;
  json values_;
};

// The tensors of a unit, which share the front of their names.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
  }

  void add(const std::string& name, std::vector<std::uint64_t> shape) {
    unit_.tensors.push_back({.name = prefix_ + name, .shape = std::move(shape)});
  }

  // Adds the matrix of a product, in either order of its two extents.
  void add_matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns,
                  std::uint64_t bias) {
    add(name + ".weight", {rows, columns});
    if (bias != 0) add(name + ".bias", {bias});
  }

  UnitSpec take() { return std::move(unit_); }

 private:
  UnitSpec unit_;
  std::string prefix_;
};

void set_orders(ZooModel& model) {
  if (!model.has_tied_head) return;
  auto& order = model.spec.forward_order;
  for (std::uint32_t i = 0; i < model.spec.units.size(); ++i) order.push_back(UnitId{i});
  order.push_back(UnitId{0});
  model.spec.backward_order.assign(order.rbegin(), order.rend());
}

// Llama, Mistral, Qwen2 and Qwen3 are one shape with other biases and norms.
ZooModel read_llama(const ModelFile& file, const std::string& type) {
  ZooModel model;
  const std::uint64_t hidden = model.hidden = file.count("hidden_size");
  const std::uint64_t inner = file.count("intermediate_size");
  const std::uint64_t heads = file.count("num_attention_heads");
  const std::uint64_t key_heads =
      file.count_or("num_key_value_heads", type == "mistral" ? 8 : heads);
  if (!file.has("head_dim") && hidden % heads != 0)
    file.fail(
        fmt::format("\"num_attention_heads\" is {}, which does not divide \"hidden_size\" = {}",
                    heads, hidden));
  const std::uint64_t width = file.count_or("head_dim", std::max<std::uint64_t>(1, hidden / heads));
  const std::uint64_t queries = heads * width;
  const std::uint64_t keys = key_heads * width;
  const bool has_bias = file.flag("attention_bias", false);
  const bool has_key_bias = has_bias || type == "qwen2";
  const std::uint64_t inner_bias = file.flag("mlp_bias", false) ? inner : 0;
  model.layers = file.count("num_hidden_layers");
  model.vocabulary = file.count("vocab_size");
  model.context = file.count_or("max_position_embeddings", 2048);
  model.has_tied_head = file.flag("tie_word_embeddings", false);
  model.attention_width = queries;
  model.kept_values = 4 * hidden + 2 * queries + 2 * keys + 3 * inner;
  if (model.layers > kLayersMax) file.fail(fmt::format("{} layers are too many", model.layers));
  UnitBuilder embedding("embedding", "model.embed_tokens.");
  embedding.add("weight", {model.vocabulary, hidden});
  model.spec.units.push_back(embedding.take());
  for (std::uint64_t i = 0; i < model.layers; ++i) {
    UnitBuilder layer(fmt::format("layer.{}", i), fmt::format("model.layers.{}.", i));
    layer.add_matrix("self_attn.q_proj", queries, hidden, has_key_bias ? queries : 0);
    layer.add_matrix("self_attn.k_proj", keys, hidden, has_key_bias ? keys : 0);
    layer.add_matrix("self_attn.v_proj", keys, hidden, has_key_bias ? keys : 0);
    layer.add_matrix("self_attn.o_proj", hidden, queries, has_bias ? hidden : 0);
    if (type == "qwen3") {
      layer.add("self_attn.q_norm.weight", {width});
      layer.add("self_attn.k_norm.weight", {width});
    }
    layer.add_matrix("mlp.gate_proj", inner, hidden, inner_bias);
    layer.add_matrix("mlp.up_proj", inner, hidden, inner_bias);
    layer.add_matrix("mlp.down_proj", hidden, inner, inner_bias == 0 ? 0 : hidden);
    layer.add("input_layernorm.weight", {hidden});
    layer.add("post_attention_layernorm.weight", {hidden});
    model.spec.units.push_back(layer.take());
  }
  UnitBuilder head("head", "");
  head.add("model.norm.weight", {hidden});
  if (!model.has_tied_head) head.add("lm_head.weight", {model.vocabulary, hidden});
  model.spec.units.push_back(head.take());
  return model;
}

ZooModel read_gpt2(const ModelFile& file) {
  ZooModel model;
  const std::uint64_t hidden = model.hidden = file.count("n_embd");
  const std::uint64_t inner = file.count_or("n_inner", 4 * hidden);
  if (hidden % file.count("n_head") != 0) file.fail("\"n_head\" does not divide \"n_embd\"");
  model.layers = file.count("n_layer");
  model.vocabulary = file.count("vocab_size");
  model.context = file.count_or("n_positions", 1024);
  model.has_tied_head = file.flag("tie_word_embeddings", true);
  model.attention_width = hidden;
  model.kept_values = 8 * hidden + 2 * inner;
  if (model.layers > kLayersMax) file.fail(fmt::format("{} layers are too many", model.layers));
  UnitBuilder embedding("embedding", "transformer.");
  embedding.add("wte.weight", {model.vocabulary, hidden});
  embedding.add("wpe.weight", {model.context, hidden});
  model.spec.units.push_back(embedding.take());
  for (std::uint64_t i = 0; i < model.layers; ++i) {
    UnitBuilder layer(fmt::format("layer.{}", i), fmt::format("transformer.h.{}.", i));
    for (const char* norm : {"ln_1", "ln_2"}) {
      layer.add(std::string(norm) + ".weight", {hidden});
      layer.add(std::string(norm) + ".bias", {hidden});
    }
    layer.add_matrix("attn.c_attn", hidden, 3 * hidden, 3 * hidden);
    layer.add_matrix("attn.c_proj", hidden, hidden, hidden);
    layer.add_matrix("mlp.c_fc", hidden, inner, inner);
    layer.add_matrix("mlp.c_proj", inner, hidden, hidden);
    model.spec.units.push_back(layer.take());
  }
  UnitBuilder head("head", "");
  head.add("transformer.ln_f.weight", {hidden});
  head.add("transformer.ln_f.bias", {hidden});
  if (!model.has_tied_head) head.add("lm_head.weight", {model.vocabulary, hidden});
  model.spec.units.push_back(head.take());
  return model;
}

}  // namespace

ZooModel read_zoo_model(const std::string& path) {
  const ModelFile file(path);
  const std::string type = file.architecture();
  const bool is_llama = type == "llama" || type == "mistral" || type == "qwen2" || type == "qwen3";
  if (!is_llama && type != "gpt2")
    file.fail(
        fmt::format("\"model_type\" is \"{}\", but plans know llama, mistral, qwen2, qwen3 "
                    "and gpt2; for others, --parameters and --layers come near",
                    type));
  ZooModel model = is_llama ? read_llama(file, type) : read_gpt2(file);
  model.architecture = type;
  set_orders(model);
  return model;
}

}  // namespace sluice
