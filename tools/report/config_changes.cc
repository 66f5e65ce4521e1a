#include "tools/report/config_changes.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/utf8.h"
#include "engine/config/config_schema_check.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

ordered_json::json_pointer pointer_to(const std::string& key) {
  std::string path = "/" + key;
  std::ranges::replace(path, '.', '/');
  return ordered_json::json_pointer(path);
}

std::vector<std::string> texts_in(const ConfigDocument& document, const std::string& key,
                                  const ordered_json& value) {
  if (value.is_string()) return {document.string(key)};
  if (!value.is_array() || value.empty()) return {};
  if (value.front().is_string()) return document.strings(key);
  std::vector<std::string> texts;
  for (std::size_t i = 0; value.front().is_object() && i < value.size(); ++i)
    std::ranges::copy(document.strings(fmt::format("{}.{}.tensors", key, i)),
                      std::back_inserter(texts));
  return texts;
}

}  // namespace

std::string config_text_of(const ConfigDocument& document) {
  ordered_json values = ordered_json::object();
  for (const std::string& key : config_keys()) {
    if (document.origin_of(key) == "default") continue;
    ordered_json value = ordered_json::parse(document.json_of(key));
    if (!std::ranges::all_of(texts_in(document, key, value), is_utf8))
      document.fail(key,
                    fmt::format("\"{}\" is {}, with bytes that are no UTF-8, as all of a config "
                                "file has to be; give the file or folder another name",
                                key, value.dump()));
    values[pointer_to(key)] = std::move(value);
  }
  return values.dump(2) + "\n";
}

std::string changed_config_text(const std::string& config,
                                const std::map<std::string, std::string>& changes) {
  ordered_json values = ordered_json::parse(config);
  for (const auto& [key, text] : changes) {
    const ordered_json value = ordered_json::parse(text);
    const auto pointer = pointer_to(key);
    if (!value.is_null()) {
      values[pointer] = value;
    } else if (values.contains(pointer)) {
      values[pointer.parent_pointer()].erase(pointer.back());
    }
  }
  return values.dump(2) + "\n";
}

}  // namespace sluice
