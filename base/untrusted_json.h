// JSON from files that others have written. The parser and the library's text functions treat lists
// and objects in different ways: only the functions call themselves for each level. So a text with
// thousands of levels would end the process when it is printed or copied.
//
// Thread rule: any thread.
#pragma once

#include <string_view>

namespace sluice {

constexpr int kJsonDepthMax = 64;

// Returns the document, or a discarded value if `text` is no JSON or has more than kJsonDepthMax
// levels. `Json` is a nlohmann::json or a nlohmann::ordered_json.
template <class Json>
Json parse_untrusted_json(std::string_view text) {
  bool is_deep = false;
  Json document = Json::parse(
      text,
      [&is_deep](int depth, typename Json::parse_event_t, const Json&) {
        is_deep = is_deep || depth > kJsonDepthMax;
        return depth <= kJsonDepthMax;
      },
      /*allow_exceptions=*/false);
  return is_deep ? Json(Json::value_t::discarded) : document;
}

}  // namespace sluice
