// Llama and the models of its shape: with other biases and norms, with experts, with latent
// attention. Names and shapes are those of transformers 5.
#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "tools/zoo/zoo_readers.h"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 12> kTypes{
    "llama",     "mistral",     "qwen2",       "qwen3", "mixtral", "qwen2_moe",
    "qwen3_moe", "deepseek_v2", "deepseek_v3", "gemma", "gemma2",  "gemma3_text"};

class Decoder {
 public:
  Decoder(const ConfigJson& file, const std::string& type) : file_(file), type_(type) {
    hidden_ = file.count("hidden_size");
    heads_ = file.count("num_attention_heads");
    has_bias_ = file.flag("attention_bias", false);
    is_latent_ = type.starts_with("deepseek");
    is_gemma_ = type.starts_with("gemma");
    const bool has_eight = type == "mistral" || type == "mixtral";
    key_heads_ = file.count_or("num_key_value_heads", has_eight ? 8 : heads_);
    if (is_latent_) return;
    if (!file.has("head_dim") && hidden_ % heads_ != 0)
      file.fail(
          fmt::format("\"num_attention_heads\" is {}, which does not divide \"hidden_size\" = {}",
                      heads_, hidden_));
    width_ =
        file.count_or("head_dim", is_gemma_ ? 256 : std::max<std::uint64_t>(1, hidden_ / heads_));
  }

  ZooModel read() {
    model_.hidden = hidden_;
    model_.layers = file_.layers("num_hidden_layers");
    model_.vocabulary = file_.count("vocab_size");
    model_.context = file_.count_or("max_position_embeddings", 2048);
    if (!file_.has("max_position_embeddings")) model_.limit = PositionLimit::kNone;
    UnitBuilder embedding("embedding", "model.embed_tokens.");
    embedding.add("weight", {model_.vocabulary, hidden_});
    add_lookup(model_, std::move(embedding));
    for (std::uint64_t i = 0; i < model_.layers; ++i) add_layer(i);
    model_.kept_values /= model_.layers;
    UnitBuilder head("head", "");
    head.add("model.norm.weight", {hidden_});
    model_.has_tied_head = file_.flag("tie_word_embeddings", is_gemma_);
    if (model_.has_tied_head) {
      model_.tied = {"model.embed_tokens.weight", "lm_head.weight"};
    } else {
      head.add("lm_head.weight", {model_.vocabulary, hidden_});
    }
    add_unit(model_, std::move(head));
    return std::move(model_);
  }

 private:
  void add_layer(std::uint64_t index) {
    UnitBuilder layer(fmt::format("layer.{}", index), fmt::format("model.layers.{}.", index));
    const std::uint64_t attention_width =
        is_latent_ ? add_latent_attention(layer) : add_attention(layer);
    has_experts(index) ? add_experts(layer) : add_dense(layer);
    layer.add("input_layernorm.weight", {hidden_});
    layer.add("post_attention_layernorm.weight", {hidden_});
    if (type_ == "gemma2" || type_ == "gemma3_text") {
      layer.add("pre_feedforward_layernorm.weight", {hidden_});
      layer.add("post_feedforward_layernorm.weight", {hidden_});
    }
    model_.kept_values += 4 * hidden_;
    add_unit(model_, std::move(layer), attention_width);
  }

  std::uint64_t add_attention(UnitBuilder& layer) {
    const std::uint64_t queries = heads_ * width_;
    const std::uint64_t keys = key_heads_ * width_;
    const bool is_qwen2 = type_.starts_with("qwen2");
    const bool has_key_bias =
        has_bias_ || (is_qwen2 && (type_ == "qwen2" || file_.flag("qkv_bias", true)));
    layer.add_matrix("self_attn.q_proj", queries, hidden_, has_key_bias ? queries : 0);
    layer.add_matrix("self_attn.k_proj", keys, hidden_, has_key_bias ? keys : 0);
    layer.add_matrix("self_attn.v_proj", keys, hidden_, has_key_bias ? keys : 0);
    layer.add_matrix("self_attn.o_proj", hidden_, queries, has_bias_ ? hidden_ : 0);
    if (type_.starts_with("qwen3") || type_ == "gemma3_text") {
      layer.add("self_attn.q_norm.weight", {width_});
      layer.add("self_attn.k_norm.weight", {width_});
    }
    model_.kept_values += 2 * queries + 2 * keys;
    return queries;
  }

  // DeepSeek's attention keeps keys and values in a latent vector, and parts of them by head.
  std::uint64_t add_latent_attention(UnitBuilder& layer) {
    const std::uint64_t plain = file_.count("qk_nope_head_dim");
    const std::uint64_t rotary = file_.count("qk_rope_head_dim");
    const std::uint64_t values = file_.count("v_head_dim");
    const std::uint64_t latent = file_.count("kv_lora_rank");
    const std::uint64_t queries = heads_ * (plain + rotary);
    const std::uint64_t bias = has_bias_ ? 1 : 0;
    if (file_.has("q_lora_rank")) {
      const std::uint64_t rank = file_.count("q_lora_rank");
      layer.add_matrix("self_attn.q_a_proj", rank, hidden_, bias * rank);
      layer.add("self_attn.q_a_layernorm.weight", {rank});
      layer.add_matrix("self_attn.q_b_proj", queries, rank);
      model_.kept_values += 2 * rank;
    } else {
      layer.add_matrix("self_attn.q_proj", queries, hidden_);
    }
    layer.add_matrix("self_attn.kv_a_proj_with_mqa", latent + rotary, hidden_,
                     bias * (latent + rotary));
    layer.add("self_attn.kv_a_layernorm.weight", {latent});
    layer.add_matrix("self_attn.kv_b_proj", heads_ * (plain + values), latent);
    layer.add_matrix("self_attn.o_proj", hidden_, heads_ * values, bias * hidden_);
    model_.kept_values += 2 * queries + 2 * latent + rotary + heads_ * (plain + 2 * values);
    return (queries + heads_ * values) / 2;  // of the two products
  }

  bool has_experts(std::uint64_t index) const {
    if (type_ == "mixtral") return true;
    if (is_latent_) return index >= file_.count_from_zero("first_k_dense_replace", 0);
    if (!type_.ends_with("_moe")) return false;
    return !file_.lists("mlp_only_layers", index) &&
           (index + 1) % file_.count_or("decoder_sparse_step", 1) == 0;
  }

  void add_gated(UnitBuilder& layer, const std::string& name, std::uint64_t inner,
                 std::uint64_t bias) {
    layer.add_matrix(name + ".gate_proj", inner, hidden_, bias * inner);
    layer.add_matrix(name + ".up_proj", inner, hidden_, bias * inner);
    layer.add_matrix(name + ".down_proj", hidden_, inner, bias * hidden_);
    model_.kept_values += 3 * inner;
  }

  void add_dense(UnitBuilder& layer) {
    add_gated(layer, "mlp", file_.count("intermediate_size"), file_.flag("mlp_bias", false));
  }

  void add_experts(UnitBuilder& layer) {
    const bool is_mixtral = type_ == "mixtral";
    // transformers 5 writes the number of Qwen's experts under the name that Mixtral has for it.
    const std::uint64_t experts = file_.count(is_latent_                 ? "n_routed_experts"
                                              : file_.has("num_experts") ? "num_experts"
                                                                         : "num_local_experts");
    const std::uint64_t inner =
        file_.count(is_mixtral ? "intermediate_size" : "moe_intermediate_size");
    const std::uint64_t used = file_.count("num_experts_per_tok");
    if (used > experts)
      file_.fail(
          fmt::format("\"num_experts_per_tok\" is {}, but a layer has {} experts", used, experts));
    layer.add_matrix("mlp.gate", experts, hidden_);
    layer.add_experts("mlp.experts.gate_up_proj", {experts, 2 * inner, hidden_}, used);
    layer.add_experts("mlp.experts.down_proj", {experts, hidden_, inner}, used);
    model_.kept_values += 3 * inner * used;
    if (type_ == "qwen2_moe") {
      add_gated(layer, "mlp.shared_expert", file_.count("shared_expert_intermediate_size"), 0);
      layer.add_matrix("mlp.shared_expert_gate", 1, hidden_);
    }
    if (is_latent_ && file_.has("n_shared_experts"))
      add_gated(layer, "mlp.shared_experts", inner * file_.count("n_shared_experts"), 0);
  }

  const ConfigJson& file_;
  const std::string& type_;
  std::uint64_t hidden_ = 0, heads_ = 0, key_heads_ = 0;
  std::uint64_t width_ = 0;  // of a head
  bool has_bias_ = false, is_latent_ = false, is_gemma_ = false;
  ZooModel model_;
};

}  // namespace

std::optional<ZooModel> read_decoder(const ConfigJson& file, const std::string& type) {
  if (std::ranges::find(kTypes, type) == kTypes.end()) return std::nullopt;
  return Decoder(file, type).read();
}

}  // namespace sluice
