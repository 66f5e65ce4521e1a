// These functions read models for model_zoo.h. There is one function for each family of models. The
// functions set all fields of ZooModel except `architecture`. If the head is tied, a function may
// leave the orders of the units empty. The functions fail with kConfig if a key of the config is
// missing or has a wrong value.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <optional>
#include <string>

#include "tools/zoo/config_json.h"
#include "tools/zoo/model_zoo.h"

namespace sluice {

// The result of each function is empty if `type` does not belong to the function's family.
std::optional<ZooModel> read_decoder(const ConfigJson& file, const std::string& type);
std::optional<ZooModel> read_other_transformer(const ConfigJson& file, const std::string& type);

// Reads the headers of safetensors files. If `config` is not null, the function takes the context
// and the number of experts per token from `config`.
// Fails with:
// - kInput: a file cannot be read, or contains extents that are impossible for a tensor.
// - kConfig: the structure of the tensors is unknown, or the tensors are quantized.
ZooModel read_tensor_files(const std::string& path, const ConfigJson* config);

// Adds a unit whose tensors are factors of matrix products.
void add_unit(ZooModel& model, UnitBuilder unit, std::uint64_t attention_width = 0,
              double fixed_tokens = 0);
// Adds a unit whose tensors are used for lookups, not for products.
void add_lookup(ZooModel& model, UnitBuilder unit);

}  // namespace sluice
