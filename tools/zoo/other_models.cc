// GPT-2, T5, Whisper and ViT. Names and shapes are those of transformers 5.
#include <fmt/format.h>

#include "tools/zoo/zoo_readers.h"

namespace sluice {
namespace {

ZooModel read_gpt2(const ConfigJson& file) {
  ZooModel model;
  const std::uint64_t hidden = model.hidden = file.count("n_embd");
  const std::uint64_t inner = file.count_or("n_inner", 4 * hidden);
  if (hidden % file.count("n_head") != 0) file.fail("\"n_head\" does not divide \"n_embd\"");
  model.layers = file.layers("n_layer");
  model.vocabulary = file.count("vocab_size");
  model.context = file.count_or("n_positions", 1024);
  model.limit = PositionLimit::kTable;
  model.kept_values = 8 * hidden + 2 * inner;
  UnitBuilder embedding("embedding", "transformer.");
  embedding.add("wte.weight", {model.vocabulary, hidden});
  embedding.add("wpe.weight", {model.context, hidden});
  add_lookup(model, std::move(embedding));
  for (std::uint64_t i = 0; i < model.layers; ++i) {
    UnitBuilder layer(fmt::format("layer.{}", i), fmt::format("transformer.h.{}.", i));
    layer.add_norm("ln_1", hidden);
    layer.add_norm("ln_2", hidden);
    layer.add_matrix("attn.c_attn", hidden, 3 * hidden, 3 * hidden);
    layer.add_matrix("attn.c_proj", hidden, hidden, hidden);
    layer.add_matrix("mlp.c_fc", hidden, inner, inner);
    layer.add_matrix("mlp.c_proj", inner, hidden, hidden);
    add_unit(model, std::move(layer), hidden);
  }
  UnitBuilder head("head", "");
  head.add_norm("transformer.ln_f", hidden);
  model.has_tied_head = file.flag("tie_word_embeddings", true);
  if (model.has_tied_head) {
    model.tied = {"transformer.wte.weight", "lm_head.weight"};
  } else {
    head.add("lm_head.weight", {model.vocabulary, hidden});
  }
  add_unit(model, std::move(head));
  return model;
}

struct T5Shape {
  std::uint64_t hidden = 0, inner = 0, attention = 0, heads = 0, buckets = 0;
  bool is_gated = false;
};

void add_t5_attention(UnitBuilder& block, const T5Shape& shape, const std::string& layer,
                      const std::string& name, bool has_bias_table) {
  for (const char* matrix : {"q", "k", "v"})
    block.add_matrix(layer + name + "." + matrix, shape.attention, shape.hidden);
  block.add_matrix(layer + name + ".o", shape.hidden, shape.attention);
  if (has_bias_table)
    block.add(layer + name + ".relative_attention_bias.weight", {shape.buckets, shape.heads});
  block.add(layer + "layer_norm.weight", {shape.hidden});
}

void add_t5_stack(ZooModel& model, const T5Shape& shape, const std::string& stack,
                  std::uint64_t blocks) {
  const bool is_decoder = stack == "decoder";
  for (std::uint64_t i = 0; i < blocks; ++i) {
    UnitBuilder block(fmt::format("{}.{}", stack, i), fmt::format("{}.block.{}.", stack, i));
    add_t5_attention(block, shape, "layer.0.", "SelfAttention", i == 0);
    if (is_decoder) add_t5_attention(block, shape, "layer.1.", "EncDecAttention", false);
    const std::string dense = is_decoder ? "layer.2." : "layer.1.";
    for (const char* matrix : {"wi_0", "wi_1"})
      if (shape.is_gated)
        block.add_matrix(dense + "DenseReluDense." + matrix, shape.inner, shape.hidden);
    if (!shape.is_gated) block.add_matrix(dense + "DenseReluDense.wi", shape.inner, shape.hidden);
    block.add_matrix(dense + "DenseReluDense.wo", shape.hidden, shape.inner);
    block.add(dense + "layer_norm.weight", {shape.hidden});
    // The decoder's own attention has a mask; that to the encoder and the encoder's have none.
    add_unit(model, std::move(block), (is_decoder ? 1 + 2 : 2) * shape.attention);
  }
}

ZooModel read_t5(const ConfigJson& file) {
  ZooModel model;
  T5Shape shape;
  shape.hidden = model.hidden = file.count("d_model");
  shape.inner = file.count("d_ff");
  shape.heads = file.count("num_heads");
  shape.attention = shape.heads * file.count("d_kv");
  shape.buckets = file.count_or("relative_attention_num_buckets", 32);
  shape.is_gated = file.text_or("feed_forward_proj", "relu").starts_with("gated");
  const std::uint64_t encoders = file.layers("num_layers");
  const std::uint64_t decoders =
      file.has("num_decoder_layers") ? file.layers("num_decoder_layers") : encoders;
  model.layers = encoders + decoders;
  model.vocabulary = file.count("vocab_size");
  model.context = file.count_or("n_positions", 512);
  model.limit = PositionLimit::kNone;
  model.kept_values = 5 * shape.hidden + 5 * shape.attention + 3 * shape.inner;
  UnitBuilder embedding("embedding", "");
  embedding.add("shared.weight", {model.vocabulary, shape.hidden});
  add_lookup(model, std::move(embedding));
  add_t5_stack(model, shape, "encoder", encoders);
  UnitBuilder norm("encoder.norm", "encoder.");
  norm.add("final_layer_norm.weight", {shape.hidden});
  add_unit(model, std::move(norm));
  add_t5_stack(model, shape, "decoder", decoders);
  UnitBuilder head("head", "");
  head.add("decoder.final_layer_norm.weight", {shape.hidden});
  model.has_tied_head = file.flag("tie_word_embeddings", true);
  if (!model.has_tied_head) head.add("lm_head.weight", {model.vocabulary, shape.hidden});
  add_unit(model, std::move(head));
  model.tied = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"};
  // The encoder's tokens and the decoder's are looked up in one table, which the head may share.
  auto& order = model.spec.forward_order;
  const auto units = static_cast<std::uint32_t>(model.spec.units.size());
  for (std::uint32_t i = 0; i < units; ++i) {
    if (i == encoders + 2) order.push_back(UnitId{0});  // behind the encoder's norm
    order.push_back(UnitId{i});
  }
  if (model.has_tied_head) {
    order.push_back(UnitId{0});
    model.tied.emplace_back("lm_head.weight");
    // A third of its uses is a product.
    model.work.front().product_elements =
        static_cast<double>(model.vocabulary) * static_cast<double>(shape.hidden) / 3;
  }
  model.spec.backward_order.assign(order.rbegin(), order.rend());
  return model;
}

// `frames` are the encoder's tokens, as many for each sequence.
void add_whisper_layer(ZooModel& model, const std::string& stack, std::uint64_t index,
                       std::uint64_t inner, std::uint64_t frames) {
  const std::uint64_t hidden = model.hidden;
  UnitBuilder layer(fmt::format("{}.{}", stack, index),
                    fmt::format("model.{}.layers.{}.", stack, index));
  const auto add_attention = [&](const std::string& name) {
    layer.add_matrix(name + ".k_proj", hidden, hidden);
    for (const char* matrix : {".v_proj", ".q_proj", ".out_proj"})
      layer.add_matrix(name + matrix, hidden, hidden, hidden);
    layer.add_norm(name + "_layer_norm", hidden);
  };
  add_attention("self_attn");
  const bool is_decoder = stack == "decoder";
  if (is_decoder) add_attention("encoder_attn");
  layer.add_matrix("fc1", inner, hidden, inner);
  layer.add_matrix("fc2", hidden, inner, hidden);
  layer.add_norm("final_layer_norm", hidden);
  if (is_decoder) {
    add_unit(model, std::move(layer), hidden);
    // The keys of the attention to the encoder are its frames.
    model.work.back().product_elements += static_cast<double>(2 * frames * hidden);
  } else {
    add_unit(model, std::move(layer), 2 * hidden, static_cast<double>(frames));
  }
}

ZooModel read_whisper(const ConfigJson& file) {
  ZooModel model;
  const std::uint64_t hidden = model.hidden = file.count("d_model");
  const std::uint64_t bins = file.count_or("num_mel_bins", 80);
  const std::uint64_t frames = file.count_or("max_source_positions", 1500);
  const std::uint64_t encoders = file.layers("encoder_layers");
  const std::uint64_t decoders = file.layers("decoder_layers");
  model.layers = encoders + decoders;
  model.vocabulary = file.count("vocab_size");
  model.context = file.count_or("max_target_positions", 448);
  model.limit = PositionLimit::kTable;
  // Each sequence of text, however short, goes with a whole sequence of sound.
  const auto sound = static_cast<double>(frames);
  const std::uint64_t inner = file.count("encoder_ffn_dim");
  model.kept_values = 2 * (8 * hidden + 2 * file.count("decoder_ffn_dim"));
  model.fixed_layers = encoders;
  model.fixed_kept_values = frames * (8 * hidden + 2 * inner);
  UnitBuilder input("encoder.input", "model.encoder.");
  input.add("conv1.weight", {hidden, bins, 3});
  input.add("conv1.bias", {hidden});
  input.add("conv2.weight", {hidden, hidden, 3});
  input.add("conv2.bias", {hidden});
  input.add("embed_positions.weight", {frames, hidden});
  add_unit(model, std::move(input), 0, sound);
  // The positions are added. The first convolution has twice as many outputs as the second.
  model.work.back().product_elements +=
      static_cast<double>(3 * bins * hidden) - sound * static_cast<double>(hidden);
  for (std::uint64_t i = 0; i < encoders; ++i)
    add_whisper_layer(model, "encoder", i, inner, frames);
  UnitBuilder norm("encoder.norm", "model.encoder.");
  norm.add_norm("layer_norm", hidden);
  add_unit(model, std::move(norm), 0, sound);
  UnitBuilder embedding("embedding", "model.decoder.");
  embedding.add("embed_tokens.weight", {model.vocabulary, hidden});
  embedding.add("embed_positions.weight", {model.context, hidden});
  add_lookup(model, std::move(embedding));
  for (std::uint64_t i = 0; i < decoders; ++i)
    add_whisper_layer(model, "decoder", i, file.count("decoder_ffn_dim"), frames);
  UnitBuilder head("head", "");
  head.add_norm("model.decoder.layer_norm", hidden);
  model.has_tied_head = file.flag("tie_word_embeddings", true);
  if (model.has_tied_head) {
    model.tied = {"model.decoder.embed_tokens.weight", "proj_out.weight"};
  } else {
    head.add("proj_out.weight", {model.vocabulary, hidden});
  }
  add_unit(model, std::move(head));
  return model;
}

ZooModel read_vit(const ConfigJson& file) {
  ZooModel model;
  const std::uint64_t hidden = model.hidden = file.count("hidden_size");
  const std::uint64_t inner = file.count("intermediate_size");
  const std::uint64_t image = file.count_or("image_size", 224);
  const std::uint64_t patch = file.count_or("patch_size", 16);
  const std::uint64_t bias = file.flag("qkv_bias", true) ? hidden : 0;
  if (image % patch != 0) file.fail("\"patch_size\" does not divide \"image_size\"");
  const std::uint64_t labels =
      file.has("id2label") ? file["id2label"].size() : file.count_or("num_labels", 2);
  model.layers = file.layers("num_hidden_layers");
  model.context = (image / patch) * (image / patch) + 1;
  model.limit = PositionLimit::kTable;
  model.kept_values = 8 * hidden + 2 * inner;
  UnitBuilder embedding("embedding", "vit.embeddings.");
  embedding.add("cls_token", {1, 1, hidden});
  embedding.add("position_embeddings", {1, model.context, hidden});
  embedding.add("patch_embeddings.projection.weight",
                {hidden, file.count_or("num_channels", 3), patch, patch});
  embedding.add("patch_embeddings.projection.bias", {hidden});
  add_unit(model, std::move(embedding));
  model.work.back().product_elements -= static_cast<double>((model.context + 1) * hidden);
  for (std::uint64_t i = 0; i < model.layers; ++i) {
    UnitBuilder layer(fmt::format("layer.{}", i), fmt::format("vit.layers.{}.", i));
    for (const char* matrix : {"q_proj", "k_proj", "v_proj"})
      layer.add_matrix(std::string("attention.") + matrix, hidden, hidden, bias);
    layer.add_matrix("attention.o_proj", hidden, hidden, hidden);
    layer.add_norm("layernorm_before", hidden);
    layer.add_norm("layernorm_after", hidden);
    layer.add_matrix("mlp.fc1", inner, hidden, inner);
    layer.add_matrix("mlp.fc2", hidden, inner, hidden);
    add_unit(model, std::move(layer), 2 * hidden);  // without a mask
  }
  UnitBuilder head("head", "");
  head.add_norm("vit.layernorm", hidden);
  if (labels != 0) head.add_matrix("classifier", labels, hidden, labels);
  add_unit(model, std::move(head));
  // The classifier sees one token of an image.
  model.work.back().product_elements -=
      static_cast<double>(labels * (hidden + 1)) * (1 - 1 / static_cast<double>(model.context));
  return model;
}

}  // namespace

std::optional<ZooModel> read_other_transformer(const ConfigJson& file, const std::string& type) {
  if (type == "gpt2") return read_gpt2(file);
  if (type == "t5") return read_t5(file);
  if (type == "whisper") return read_whisper(file);
  if (type == "vit") return read_vit(file);
  return std::nullopt;
}

}  // namespace sluice
