// The function reads Hjson, an extension of JSON. Hjson allows comments (#, //, /* */), keys and
// strings without quotes, missing and trailing commas, and a document without outer braces.
// DeepSpeed reads its files as Hjson. The reader keeps the place of each key for messages.
// (https://hjson.github.io/)
//
// Thread rule: any thread.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace sluice {

using OrderedJson = nlohmann::ordered_json;

struct HjsonDocument {
  std::string name;  // the document's name in messages
  std::string text;
  OrderedJson root;                           // always an object
  std::map<std::string, std::size_t> places;  // dotted key -> the key's offset in `text`

  // Returns "NAME:LINE:COLUMN" of a key. For a key that is not in the text, the result is "NAME".
  std::string place_of(const std::string& key) const;
};

// Fails with kConfig and "NAME:LINE:COLUMN: ..." in these cases:
// - The text is not Hjson, or has a duplicate key.
// - The outermost value is no object.
// - There are more than 32 levels of nesting.
HjsonDocument read_hjson(std::string_view text, std::string name);

}  // namespace sluice
