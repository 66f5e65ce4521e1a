#include "tools/deepspeed/deepspeed_import.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/config_document.h>
#include <sluice/error.h>
#include "engine/config/config_schema_check.h"
#include "engine/config/learning_rate.h"
#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

// Decodes base64, with '+' and '/' or with '-' and '_'; nothing for other text.
std::optional<std::string> decoded(std::string_view text) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  std::uint32_t bits = 0;
  int held = 0;
  for (char character : text) {
    if (character == '+') character = '-';
    if (character == '/') character = '_';
    const std::size_t digit = kAlphabet.find(character);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    bytes += static_cast<char>(bits >> held & 0xff);
  }
  return bytes;
}

// The last line of the report that gave `new_key`, or a section or list around it, its value.
const ImportLine* origin_of(const ImportReport& report, const std::string& new_key) {
  for (auto line = report.mapped.rbegin(); line != report.mapped.rend(); ++line)
    if (new_key == line->new_key || new_key.starts_with(line->new_key + ".")) return &*line;
  return nullptr;
}

// Mapped values that no config of Sluice may have: lines of the report, with the file's keys.
std::vector<ImportLine> values_out_of_range(const ImportPass& pass) {
  std::vector<ImportLine> lines;
  check_against_schema(nlohmann::json::parse(pass.config.dump()), config_schema(), "",
                       [&](const std::string& key, const std::string& message) {
                         const ImportLine* origin = origin_of(pass.report, key);
                         lines.push_back(origin == nullptr ? ImportLine{} : *origin);
                         lines.back().text = message;
                       });
  return lines;
}

// Takes the key out of the file's values, written as "section.key".
void remove_key(OrderedJson& root, const std::string& key) {
  std::string pointer = "/" + key;
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  const OrderedJson::json_pointer place(pointer);
  if (root.contains(place)) root[place.parent_pointer()].erase(place.back());
}

// The checks of keys that depend on each other, as the engine and the training make them.
void check(ImportPass& pass) {
  try {
    const ConfigDocument document(pass.config.dump(), "the imported config");
    (void)engine_config(document);
    (void)learning_rate_options(document);
  } catch (const Error& error) {
    pass.report.refused.push_back({.text = error.what()});
  }
}

void import_all(ImportPass& pass, const OrderedJson& root) {
  pass.add_members(root, "", "", /*is_strict=*/false);
  import_batch(pass);
  import_precision(pass);
  import_zero(pass);
  import_storage(pass);
  import_optimizer(pass);
  import_scheduler(pass);
  import_rest(pass);
}

}  // namespace

bool is_deepspeed_file(std::string_view text) {
  const auto& known = config_schema().at("properties");
  const std::map<std::string, std::size_t> places = hjson_places(text);
  bool is_deepspeed = places.contains("optimizer.params");
  for (const auto& [name, place] : places) {
    if (name.find('.') != std::string::npos) continue;
    const bool is_row = find_deepspeed_key(name) != nullptr;
    if (known.contains(name) && !is_row) return false;
    is_deepspeed |= is_row && !known.contains(name);
  }
  return is_deepspeed;
}

ImportedConfig import_deepspeed(std::string_view text, const std::string& name,
                                const DeepspeedValues& values) {
  const HjsonDocument document = read_hjson(text, name);
  ImportPass pass(document, values);
  import_all(pass, document.root);
  const std::vector<ImportLine> out_of_range = values_out_of_range(pass);
  if (out_of_range.empty()) {
    check(pass);
    return {.config = pass.config.dump(2), .report = pass.report};
  }
  // Refused keys are left out: the config is that of the file without them.
  OrderedJson rest = document.root;
  for (const ImportLine& line : out_of_range) remove_key(rest, line.key);
  ImportPass without(document, values);
  import_all(without, rest);
  check(without);
  ImportReport report = pass.report;
  report.refused.insert(report.refused.end(), out_of_range.begin(), out_of_range.end());
  return {.config = without.config.dump(2), .report = report};
}

std::string config_text(const std::string& argument) {
  std::error_code error;  // a text in base64 is longer than names may be
  if (!std::filesystem::exists(argument, error)) {
    const std::optional<std::string> bytes = decoded(argument);
    if (bytes && bytes->find('{') != std::string::npos) return *bytes;
  }
  return ConfigDocument::text_of_file(argument);
}

}  // namespace sluice
