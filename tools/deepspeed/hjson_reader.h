// Reads Hjson, an extension of JSON (https://hjson.github.io/). Hjson allows the comments of C++
// and of Python. Hjson also allows keys and strings without quotes, and documents without outer
// braces. A comma may be missing, or may follow the last element. A byte order mark before the text
// is skipped. DeepSpeed reads its files as Hjson. The reader stores the place of each key, so that
// messages can name the place.
//
// Thread rule: any thread.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace sluice {

using OrderedJson = nlohmann::ordered_json;

struct HjsonDocument {
  std::string name;                           // the name that messages give to the document
  std::string text;                           // without a byte order mark
  OrderedJson root;                           // always an object
  std::map<std::string, std::size_t> places;  // dotted key -> the key's offset in `text`

  std::vector<std::size_t> line_begins;  // offsets in `text`

  // Returns the place of a key as "NAME:LINE:COLUMN". If the key is not in the text, the result is
  // "NAME".
  std::string place_of(const std::string& key) const;
};

// Fails with kConfig and a message that begins with "NAME:LINE:COLUMN: ", in these cases:
// - The text is not Hjson, or has a duplicate key.
// - The outermost value is no object.
// - There are more than 32 levels of nesting.
// - The text is not UTF-8.
HjsonDocument read_hjson(std::string_view text, std::string name);

// Returns the places of the keys of `text`. If `text` is not Hjson, the result has only the keys
// before the first error.
std::map<std::string, std::size_t> hjson_places(std::string_view text);

}  // namespace sluice
