// The functions return descriptions of models, from which plans are made. A description comes from
// a config file (config.json of Hugging Face's transformers), or from the headers of safetensors
// files. A description contains the names and shapes of the tensors, but no weights. The tensors
// are grouped into the units that an engine would use.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sluice/model_spec.h>

namespace sluice {

// The computation of a unit.
struct UnitWork {
  // The number of matrix elements by which each token is multiplied in one use of the unit. Lookups
  // do not count. An expert counts only if the token uses the expert.
  double product_elements = 0;
  // The width of all heads of masked attention together; 0 = no attention. With a mask, a token
  // sees half of a sequence on average. Attention without a mask therefore counts with twice its
  // width. Attention to an encoder of the same length also counts with twice its width. If an
  // encoder has a fixed length, its keys count in `product_elements`.
  std::uint64_t attention_width = 0;
  // The number of tokens per sequence in this unit, if this number is fixed. For example, an
  // encoder of sound has a fixed number of frames. If the value is 0, the number of tokens is the
  // length of the sequence.
  double fixed_tokens = 0;
};

// The reason why the length of a sequence is limited.
enum class PositionLimit : std::uint8_t {
  kNone,      // the positions are relative
  kTraining,  // the model was not trained on longer sequences
  kTable,     // the model has an embedding for each position
};

struct ZooModel {
  std::string architecture;  // "llama"
  // The units are the embedding, each layer and the head. If the head is tied, a second use of the
  // embedding takes the place of the head.
  ModelSpec spec;
  std::vector<UnitWork> work;  // by unit
  // All names of the tied tensor. The first name is the tensor's name in `spec`. If the list is
  // empty, no tensor is tied.
  std::vector<std::string> tied;
  double active_parameters = 0;  // the parameters that a token uses
  std::uint64_t hidden = 0;
  std::uint64_t layers = 0;
  std::uint64_t vocabulary = 0;  // 0: the model computes no logits per token
  std::uint64_t context = 0;     // the largest number of tokens of a sequence
  PositionLimit limit = PositionLimit::kTraining;
  // The number of values per token that a layer keeps for its backward pass. The kept values are
  // the inputs of the norms, products and activation functions. Attention is assumed to keep no
  // matrix of scores.
  std::uint64_t kept_values = 0;
  // `fixed_layers` is the number of layers that have a fixed number of tokens. Each of these layers
  // keeps `fixed_kept_values` values per sequence.
  std::uint64_t fixed_layers = 0;
  std::uint64_t fixed_kept_values = 0;

  bool has_tied_head = false;
  bool counts_all_experts = false;  // experts per token are unknown, so all experts count

  double parameters() const;
};

// `path` is a config.json, a safetensors file, the index of several safetensors files, or a folder
// with such files. If no file or folder has this path, `path` is the name of a well-known model
// (tools/zoo/model_presets.h). If the architecture in the config is unknown, the model is read from
// the names and shapes of the tensors.
// Fails with:
// - kInput: a file cannot be read or is no JSON.
// - kConfig: the architecture is unknown, and there are no tensor files. The message lists the
//   known architectures.
// - kConfig: a key is missing, sizes contradict each other or are too large for any model, or
//   tensors are quantized.
ZooModel read_zoo_model(const std::string& path);

}  // namespace sluice
