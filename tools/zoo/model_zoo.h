// Models, read from their config files (config.json of Hugging Face's transformers) for plans. A
// model has the tensors' names and shapes, in the units that an engine would get, but no weights.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/model_spec.h>

namespace sluice {

struct ZooModel {
  std::string architecture;  // "llama"
  // The units are the embedding, each layer and the head. A tied head is a second use of the
  // embedding.
  ModelSpec spec;
  bool has_tied_head = false;
  std::uint64_t hidden = 0;
  std::uint64_t layers = 0;
  std::uint64_t vocabulary = 0;
  std::uint64_t context = 0;  // the largest number of tokens of a sequence
  // The widths of all heads together, for the products in attention: of queries with keys, and of
  // probabilities with values.
  std::uint64_t attention_width = 0;
  // The number of values per token that a layer keeps for its backward pass: the inputs of the
  // norms, products and activations. This assumes that attention keeps no matrix of scores.
  std::uint64_t kept_values = 0;
};

// `path` is a config.json, or a folder with one.
// Fails with: kInput for a file that cannot be read or is no JSON; kConfig for an unknown
// architecture (the message lists the known ones), a missing key, or sizes that do not fit
// together.
ZooModel read_zoo_model(const std::string& path);

}  // namespace sluice
