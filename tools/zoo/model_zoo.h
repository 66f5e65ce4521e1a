// Descriptions of models, for plans. The descriptions are read from config files (config.json of
// Hugging Face's transformers), or from the headers of safetensors files. A model has the tensors'
// names and shapes, in the units that an engine would get, but no weights.
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
  // The elements by which a token is multiplied in one use. Lookups are left out, and so are the
  // experts that a token does not reach.
  double product_elements = 0;
  // The width of all heads of masked attention together; 0 = no attention. With a mask, a token
  // sees half of a sequence. Attention without a mask, or to an encoder of the same length, counts
  // with twice its width. The keys of an encoder of fixed length count in `product_elements`.
  std::uint64_t attention_width = 0;
  // The number of the unit's tokens for each sequence, if that number is fixed; 0 = the number is
  // that of the sequence. An encoder of sound has a fixed number of frames.
  double fixed_tokens = 0;
};

// The bound on the length of a sequence.
enum class PositionLimit : std::uint8_t {
  kNone,      // the positions are relative
  kTraining,  // the model has seen no longer sequences
  kTable,     // the model has an embedding for each position
};

struct ZooModel {
  std::string architecture;  // "llama"
  // The units are the embedding, each layer and the head. A tied head is a second use of the
  // embedding.
  ModelSpec spec;
  std::vector<UnitWork> work;  // by unit
  // The names that one tensor may have. The first name is the tensor's name in `spec`. If the list
  // is empty, no tensor is tied.
  std::vector<std::string> tied;
  double active_parameters = 0;  // that a token uses; all, if there are no experts
  std::uint64_t hidden = 0;
  std::uint64_t layers = 0;
  std::uint64_t vocabulary = 0;  // 0: no logits for each token
  std::uint64_t context = 0;     // the largest number of tokens of a sequence
  PositionLimit limit = PositionLimit::kTraining;
  // The number of values per token that a layer keeps for its backward pass. These values are the
  // inputs of the norms, products and activations. The number assumes that attention keeps no
  // matrix of scores.
  std::uint64_t kept_values = 0;
  // Layers whose number of tokens is fixed, and the values that each of them keeps per sequence.
  std::uint64_t fixed_layers = 0;
  std::uint64_t fixed_kept_values = 0;

  bool has_tied_head = false;
  bool counts_all_experts = false;  // there are experts, but it is not known how many a token uses

  double parameters() const;
};

// `path` is a config.json, a safetensors file or its index, or a folder with them. If there is no
// such file or folder, `path` is the name of a well-known model (tools/zoo/model_presets.h). An
// architecture that is not known by its config is read from the tensors' names and shapes.
// Fails with:
// - kInput: a file cannot be read or is no JSON.
// - kConfig: the architecture is unknown, and there are no tensors. The message lists the known
//   architectures.
// - kConfig: a key is missing, sizes do not fit together or are beyond any model's, or tensors are
//   quantized.
ZooModel read_zoo_model(const std::string& path);

}  // namespace sluice
