// Reads Hjson, of which JSON is a part: comments (#, //, /* */), keys and strings without quotes,
// commas that may be missing or trail, a document without its outer braces. DeepSpeed reads its
// files as Hjson. The reader keeps the place of each key for messages. (https://hjson.github.io/)
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
  std::string name;  // what messages call it
  std::string text;
  OrderedJson root;                           // an object
  std::map<std::string, std::size_t> places;  // dotted key -> where it begins in `text`

  // "NAME:LINE:COLUMN" of a key, or NAME for one that is not in the text.
  std::string place_of(const std::string& key) const;
};

// Fails with: kConfig and "NAME:LINE:COLUMN: ..." for what is no Hjson, a key that is given twice,
// an outermost value that is no object, and nesting beyond 32 levels.
HjsonDocument read_hjson(std::string_view text, std::string name);

}  // namespace sluice
