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
  // sees half of a sequence. Attention without a mask, or to an encoder, counts with twice its
  // width, times the number of its keys divided by the length of the sequence.
  std::uint64_t attention_width = 0;
  // The number of the unit's tokens for each token of the plan. An encoder has a different length.
  double tokens = 1;
};

struct ZooModel {
  std::string architecture;  // "llama"
  // The units are the embedding, each layer and the head. A tied head is a second use of the
  // embedding.
  ModelSpec spec;
  std::vector<UnitWork> work;  // by unit
  // The names that one tensor may have. The first one is the tensor's name in `spec`. If the list
  // is empty, no tensor is tied.
  std::vector<std::string> tied;
  double active_parameters = 0;  // that a token uses; all, if there are no experts
  std::uint64_t hidden = 0;
  std::uint64_t layers = 0;
  std::uint64_t vocabulary = 0;  // 0: no logits for each token
  std::uint64_t context = 0;     // the largest number of tokens of a sequence
  // The number of values per token that a layer keeps for its backward pass. These values are the
  // inputs of the norms, products and activations. This assumes that attention keeps no matrix of
  // scores.
  std::uint64_t kept_values = 0;

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
