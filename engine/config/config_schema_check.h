// Checks JSON values against the part of JSON Schema that configs/sluice.schema.json uses. This
// part consists of type, properties, enum, ranges, items, minItems, and format "size". Unknown
// properties are refused. The check, the defaults and the documentation all use this one schema.
// The functions are pure.
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

// Returns the schema of a key such as "optimizer.beta1" or "optimizer.groups.0.tensors". The result
// is null if the key is unknown.
const nlohmann::json* find_key_schema(const std::string& key);

// Returns all keys of the schema that have a value, in the order of the schema. The keys have the
// dotted form, such as "optimizer.beta1".
std::vector<std::string> config_keys();

// A function that receives the key ("optimizer.beta1") and the problem with the key's value. The
// function must throw.
using SchemaComplaint = std::function<void(const std::string& key, const std::string& message)>;

// Checks the value of `key`, and everything inside the value. An empty `key` stands for the whole
// document.
// The function does not complain about unknown keys, because unknown_keys() finds all unknown keys
// at once.
void check_against_schema(const nlohmann::json& value, const nlohmann::json& schema,
                          const std::string& key, const SchemaComplaint& complain);

struct UnknownKey {
  std::string key;   // "optimizer.learning_rat"
  std::string hint;  // from nearest_key_hint()
};

// Returns the keys in `document` that the schema does not have. Keys inside an unknown key are left
// out.
std::vector<UnknownKey> unknown_keys(const nlohmann::json& document);

// Returns a question for the end of a message, such as: did you mean "optimizer.beta1"? The
// question names the known key that is nearest to `unknown`. `parent` is the section that contains
// `unknown`. The nearest key may be in another section. If `unknown` is a known key in dotted form,
// the result says how a file writes the key.
std::string nearest_key_hint(const std::string& unknown, const std::string& parent);

}  // namespace sluice
