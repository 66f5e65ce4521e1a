// Models as their config files describe them (config.json of Hugging Face's transformers): the
// tensors by name and shape, in units as an engine would get them, without any weights. For plans.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/model_spec.h>

namespace sluice {

struct ZooModel {
  std::string architecture;  // "llama"
  // Units: the embedding, each layer, the head. A tied head is a second use of the embedding.
  ModelSpec spec;
  bool has_tied_head = false;
  std::uint64_t hidden = 0;
  std::uint64_t layers = 0;
  std::uint64_t vocabulary = 0;
  std::uint64_t context = 0;  // tokens of a sequence at most
  // Widths of all heads together: queries, which attention multiplies with keys, and keys with
  // values.
  std::uint64_t attention_width = 0;
  // Values of a token that backward reads in a layer, where attention keeps no matrix of scores:
  // the inputs of the norms, products and activations.
  std::uint64_t kept_values = 0;
};

// `path` is a config.json, or a folder with one.
// Fails with: kInput for a file that cannot be read or is no JSON, kConfig for an architecture that
// is not known (the message has those that are), a key that is missing, and sizes that do not fit
// together.
ZooModel read_zoo_model(const std::string& path);

}  // namespace sluice
