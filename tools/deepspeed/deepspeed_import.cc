#include "tools/deepspeed/deepspeed_import.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/config_document.h>
#include <sluice/error.h>
#include "engine/config/config_schema_check.h"
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

bool is_of_deepspeed(const OrderedJson& root) {
  const auto& known = config_schema().at("properties");
  bool is_deepspeed = false;
  for (const auto& [name, value] : root.items()) {
    const bool is_row = find_deepspeed_key(name) != nullptr;
    if (known.contains(name) && !is_row) return false;
    is_deepspeed |= is_row && !known.contains(name);
    if (name == "optimizer" && value.is_object()) is_deepspeed |= value.contains("params");
  }
  return is_deepspeed;
}

// The library's own check of the resulting config.
void check(ImportPass& pass) {
  try {
    (void)engine_config(ConfigDocument(pass.config.dump(), "the imported config"));
  } catch (const Error& error) {
    pass.report.refused.push_back({.text = error.what()});
  }
}

}  // namespace

bool is_deepspeed_file(std::string_view text) {
  try {
    return is_of_deepspeed(read_hjson(text, "").root);
  } catch (const Error&) {
    return false;
  }
}

ImportedConfig import_deepspeed(std::string_view text, const std::string& name,
                                const DeepspeedValues& values) {
  const HjsonDocument document = read_hjson(text, name);
  ImportPass pass(document, values);
  pass.add_members(document.root, "", "", /*is_strict=*/false);
  import_batch(pass);
  import_precision(pass);
  import_zero(pass);
  import_storage(pass);
  import_optimizer(pass);
  import_scheduler(pass);
  check(pass);
  return {.config = pass.config.dump(2), .report = pass.report};
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
