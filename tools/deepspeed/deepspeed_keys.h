// The table of DeepSpeed's configuration keys (deepspeed_keys.json). Each key has a row that says
// how the importer treats the key. The importer and `sluice config explain` read this table.
// docs/deepspeed_keys.md is generated from the table.
//
// Thread rule: any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace sluice {

enum class DeepspeedClass : std::uint8_t {
  kMap,     // the key's value goes into keys of Sluice
  kDerive,  // Sluice derives the value itself
  kNote,    // the key has no effect on training
  // The values in `refuse` are errors. Either Sluice lacks a feature that such a value needs, or
  // ignoring the value would change the result of training.
  kRefuse,
  kError,    // not a key of DeepSpeed; DeepSpeed refuses or misreads the key
  kForeign,  // not a key of DeepSpeed; DeepSpeed ignores the key
  kAlias,    // another name of the key that the field `is` names
};

struct DeepspeedKey {
  std::string key;  // dotted
  DeepspeedClass key_class = DeepspeedClass::kNote;
  std::string type;     // section, bool, int, number, string, enum, path, pair, object, any
  bool strict = false;  // for a section: DeepSpeed refuses unknown keys in the section
  nlohmann::ordered_json fallback;  // DeepSpeed's default; null = none
  // The option whose value replaces "auto". If there is no such option, the default replaces
  // "auto".
  std::string option;
  std::string refuse;  // the values that are refused
  std::optional<double> least, most;
  std::vector<std::string> values;  // for an enum
  std::vector<std::string> to;      // the keys of Sluice that get the value
  // The optimizers or schedulers that take the key. For others, DeepSpeed raises. Empty = all.
  std::vector<std::string> of;
  // If the value is missing or "auto", Sluice chooses a value instead of DeepSpeed's default.
  bool chosen = false;
  std::string is;   // for an alias: the key's real name
  std::string why;  // the reason, as a text for people
};

const std::vector<DeepspeedKey>& deepspeed_keys();

// Returns null if there is no such key.
const DeepspeedKey* find_deepspeed_key(std::string_view key);

std::string_view name_of(DeepspeedClass key_class);

// Returns a hint such as "; did you mean "gradient_clipping"?". The hint names the known key that
// is most similar to `key`. Returns an empty text if no known key is similar.
std::string deepspeed_key_hint(const std::string& key);

}  // namespace sluice
