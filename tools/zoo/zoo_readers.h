// The functions that read models for model_zoo.h, one function for each family of models. Each
// function sets everything except `architecture` and, for a tied head, the orders of units. The
// functions fail with kConfig.
//
// Thread rule: pure; any thread.
#pragma once

#include <optional>
#include <string>

#include "tools/zoo/config_json.h"
#include "tools/zoo/model_zoo.h"

namespace sluice {

// The result is empty for a type that does not belong to these families.
std::optional<ZooModel> read_decoder(const ConfigJson& file, const std::string& type);
std::optional<ZooModel> read_other_transformer(const ConfigJson& file, const std::string& type);

// The function reads the headers of safetensors files. `config` may be null. `config` is read for
// the context, and for the number of experts that a token uses.
// Fails with:
// - kInput: a file cannot be read, or has extents that no tensor has.
// - kConfig: the tensors have no common structure, or are quantized.
ZooModel read_tensor_files(const std::string& path, const ConfigJson* config);

// Adds a unit whose tensors are factors of products.
void add_unit(ZooModel& model, UnitBuilder unit, std::uint64_t attention_width = 0,
              double fixed_tokens = 0);
// Adds a unit whose tensors are only looked up.
void add_lookup(ZooModel& model, UnitBuilder unit);

}  // namespace sluice
