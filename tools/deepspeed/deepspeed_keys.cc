#include "tools/deepspeed/deepspeed_keys.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/edit_distance.h"

namespace sluice {

extern const char* const kDeepspeedKeysText;

namespace {

using nlohmann::ordered_json;

constexpr std::array<std::pair<std::string_view, DeepspeedClass>, 7> kClasses{
    {{"map", DeepspeedClass::kMap},
     {"derive", DeepspeedClass::kDerive},
     {"note", DeepspeedClass::kNote},
     {"refuse", DeepspeedClass::kRefuse},
     {"error", DeepspeedClass::kError},
     {"foreign", DeepspeedClass::kForeign},
     {"alias", DeepspeedClass::kAlias}}};

DeepspeedClass class_from(const std::string& name) {
  const auto* const found =
      std::ranges::find(kClasses, name, &std::pair<std::string_view, DeepspeedClass>::first);
  SLUICE_CHECK(found != kClasses.end(), "the table of DeepSpeed's keys has only known classes");
  return found->second;
}

std::optional<double> bound(const ordered_json& row, const char* name) {
  if (!row.contains(name)) return std::nullopt;
  return row[name].get<double>();
}

std::vector<DeepspeedKey> read_table() {
  std::vector<DeepspeedKey> keys;
  for (const ordered_json& row : ordered_json::parse(kDeepspeedKeysText)) {
    const auto list = [&row](const char* name) {
      return row.value(name, ordered_json::array()).get<std::vector<std::string>>();
    };
    keys.push_back({.key = row.at("key"),
                    .key_class = class_from(row.at("class")),
                    .type = row.at("type"),
                    .strict = row.value("strict", false),
                    .fallback = row.value("default", ordered_json()),
                    .option = row.value("auto", ""),
                    .refuse = row.value("refuse", ""),
                    .least = bound(row, "least"),
                    .most = bound(row, "most"),
                    .values = list("values"),
                    .to = list("to"),
                    .of = list("of"),
                    .chosen = row.value("chosen", false),
                    .is = row.value("is", ""),
                    .why = row.at("why")});
  }
  return keys;
}

}  // namespace

const std::vector<DeepspeedKey>& deepspeed_keys() {
  static const std::vector<DeepspeedKey> keys = read_table();
  return keys;
}

const DeepspeedKey* find_deepspeed_key(std::string_view key) {
  const auto& keys = deepspeed_keys();
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const auto& row) { return row.key == key; });
  return found == keys.end() ? nullptr : &*found;
}

std::string_view name_of(DeepspeedClass key_class) {
  for (const auto& [name, known] : kClasses) {
    if (known == key_class) return name;
  }
  return "unknown";
}

std::string deepspeed_key_hint(const std::string& key) {
  const auto last_word = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  const std::string word = last_word(key);
  const DeepspeedKey* nearest = nullptr;
  std::size_t nearest_distance = std::max<std::size_t>(2, word.size() / 4) + 1;
  for (const DeepspeedKey& row : deepspeed_keys()) {
    if (row.key_class == DeepspeedClass::kError || row.key_class == DeepspeedClass::kForeign ||
        row.key_class == DeepspeedClass::kAlias)
      continue;
    // The same word in another section is nearer than another word in the same one.
    const bool is_elsewhere =
        row.key.substr(0, row.key.rfind('.') + 1) != key.substr(0, key.rfind('.') + 1);
    const std::size_t distance = edit_distance(word, last_word(row.key)) + (is_elsewhere ? 1 : 0);
    if (distance >= nearest_distance) continue;
    nearest = &row;
    nearest_distance = distance;
  }
  return nearest == nullptr ? "" : fmt::format("; did you mean \"{}\"?", nearest->key);
}

}  // namespace sluice
