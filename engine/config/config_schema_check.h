// Checks JSON values against the part of JSON Schema that configs/sluice.schema.json uses: type,
// properties (others are refused), enum, ranges, items, minItems, and format "size". One table
// serves the check, the defaults and the documentation. Pure.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace sluice {

// The schema's text, embedded at build time.
extern const char* const kConfigSchemaText;

const nlohmann::json& config_schema();

// The schema of a key such as "optimizer.beta1" or "optimizer.groups.0.tensors"; null for an
// unknown key.
const nlohmann::json* find_key_schema(const std::string& key);

// All keys of the schema that have a value, in dotted form, in the schema's order.
std::vector<std::string> config_keys();

// A function that receives the key ("optimizer.beta1") and the problem of its value. The function
// must throw.
using SchemaComplaint = std::function<void(const std::string& key, const std::string& message)>;

// Checks the value of `key`, and everything inside the value. An empty `key` stands for the whole
// document.
void check_against_schema(const nlohmann::json& value, const nlohmann::json& schema,
                          const std::string& key, const SchemaComplaint& complain);

// Returns the end of a message, which asks whether the known key nearest to `unknown` was meant.
// `schema` is the schema of the section `parent`. If this section has no near key, the hint names a
// key from anywhere in the whole schema.
std::string nearest_key_hint(const std::string& unknown, const std::string& parent);

}  // namespace sluice
