// Parses the JSON of a config, with its comments, and notes where each key stands. A key that is
// given twice is an error. The functions are pure.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace sluice {

// The offset at which a key begins in the text, by dotted key ("optimizer.beta1").
using KeyPlaces = std::map<std::string, std::size_t, std::less<>>;

// A function that receives the offset of a problem in the text, and the problem. The function must
// throw.
using ParseComplaint = std::function<void(std::size_t offset, const std::string& message)>;

// `parent` is the dotted key of the whole text, or empty for a document.
nlohmann::json parse_config(std::string_view text, const std::string& parent, KeyPlaces& places,
                            const ParseComplaint& complain);

}  // namespace sluice
