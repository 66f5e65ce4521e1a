// The table of DeepSpeed's configuration keys (deepspeed_keys.json): one row a key, with what
// becomes of it. The importer, `sluice config explain` and docs/deepspeed_keys.md all read it.
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
  kMap,      // its value goes into keys of Sluice
  kDerive,   // Sluice works it out itself
  kNote,     // it has no effect on training
  kRefuse,   // it changes the numbers, or needs what Sluice lacks: an error, as `refuse` says
  kError,    // no key of DeepSpeed, which refuses or misreads it
  kForeign,  // no key of DeepSpeed, which ignores it
  kAlias,    // another name of `is`
};

struct DeepspeedKey {
  std::string key;  // dotted
  DeepspeedClass key_class = DeepspeedClass::kNote;
  std::string type;     // section, bool, int, number, string, enum, path, pair, object, any
  bool strict = false;  // of a section: DeepSpeed refuses keys in it that it does not know
  nlohmann::ordered_json fallback;  // DeepSpeed's default; null = none
  std::string option;               // that says what "auto" is; empty = it is the default
  std::string refuse;               // which values are refused
  std::optional<double> least, most;
  std::vector<std::string> values;  // of an enum
  std::vector<std::string> to;      // keys of Sluice
  std::string is;                   // of an alias
  std::string why;                  // for people
};

const std::vector<DeepspeedKey>& deepspeed_keys();

// Null when there is no such key.
const DeepspeedKey* find_deepspeed_key(std::string_view key);

std::string_view name_of(DeepspeedClass key_class);

// "; did you mean "gradient_clipping"?" for the key nearest to `key`, or nothing when none is near.
std::string deepspeed_key_hint(const std::string& key);

}  // namespace sluice
