// The text of a JSON document that the command writes.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace sluice {

// A path need not be UTF-8, but JSON is: other bytes become U+FFFD. Without that, a command would
// fail when all of its work is done.
template <class Document>
std::string json_text(const Document& document, int indent = 2) {
  return document.dump(indent, ' ', /*ensure_ascii=*/false, Document::error_handler_t::replace);
}

}  // namespace sluice
