#include <sluice/config_document.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/float_environment.h"
#include "base/text_file.h"
#include "engine/config/config_parser.h"
#include "engine/config/config_schema_check.h"

namespace sluice {
namespace {

using nlohmann::json;

// Far more than any config has, and far less than a wrong file could take of memory.
constexpr std::size_t kConfigBytesMax = 1 << 20;

std::string line_and_column(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t line_begin = before.rfind('\n') + 1;  // npos + 1 = 0
  return fmt::format("{}:{}", line, before.size() - line_begin + 1);
}

// "storage.paths" holds "storage.paths" and "storage.paths.1".
bool holds(std::string_view key, std::string_view inner) {
  return inner.starts_with(key) && (inner.size() == key.size() || inner[key.size()] == '.');
}

json::json_pointer pointer_to(std::string_view key) {
  std::string pointer = "/" + std::string(key);
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  return json::json_pointer(pointer);
}

}  // namespace

struct ConfigDocument::Content {
  std::string name;
  std::string text;
  json values;
  KeyPlaces places;
  // Each key that was set, with its --set, in the order of the command line.
  std::vector<std::pair<std::string, std::string>> assignments;

  std::string place_of(std::string_view key) const {
    // A list may have its entries from one --set, and one of them from a later one.
    const auto newest =
        std::find_if(assignments.rbegin(), assignments.rend(), [&](const auto& assigned) {
          return holds(assigned.first, key) || holds(key, assigned.first);
        });
    if (newest != assignments.rend()) return "--set " + newest->second;
    const auto place = places.find(key);
    return place == places.end() ? name : name + ":" + line_and_column(text, place->second);
  }

  [[noreturn]] void fail(std::string_view key, const std::string& message) const {
    throw Error(ErrorCode::kConfig, place_of(key) + ": " + message);
  }

  // One line for each key, in the order of the text.
  void check_keys() const {
    std::vector<UnknownKey> unknown = unknown_keys(values);
    if (unknown.empty()) return;
    std::ranges::stable_sort(unknown, {}, [this](const UnknownKey& of) {
      const auto place = places.find(of.key);
      return place == places.end() ? SIZE_MAX : place->second;
    });
    std::string message;
    for (const UnknownKey& of : unknown) {
      const std::string where = message.empty() ? "" : "\n" + place_of(of.key) + ": ";
      message += fmt::format("{}unknown key \"{}\"{}", where, of.key, of.hint);
    }
    fail(unknown.front().key, message);
  }

  void check() const {
    check_keys();
    check_against_schema(
        values, config_schema(), "",
        [this](const std::string& key, const std::string& message) { fail(key, message); });
  }

  // For --set: a section gets the keys of an object, and keeps its others. Any other value replaces
  // the old one.
  void assign(json& target, const json& value, const std::string& key,
              const std::string& assignment) {
    if (!value.is_object() || !target.is_object()) assignments.emplace_back(key, assignment);
    if (!value.is_object()) {
      target = value;
      return;
    }
    if (!target.is_object()) target = json::object();
    for (const auto& [name, member] : value.items())
      assign(target[name], member, key + "." + name, assignment);
  }

  // For --set: an entry of a list has the number of one that is there, or the next. A larger one
  // would fill the list with as many entries of nothing.
  void check_entry_numbers(const std::string& key, const ParseComplaint& complain) const {
    for (std::size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1)) {
      const std::string list = key.substr(0, dot);
      const json* schema = find_key_schema(list);
      if (schema == nullptr || schema->value("type", "") != "array") continue;
      const std::size_t end = std::min(key.find('.', dot + 1), key.size());
      const std::string_view number = std::string_view(key).substr(dot + 1, end - dot - 1);
      const json::json_pointer pointer = pointer_to(list);
      const std::size_t count = values.contains(pointer) ? values.at(pointer).size() : 0;
      std::size_t entry = 0;
      const auto read = std::from_chars(number.data(), number.data() + number.size(), entry);
      const bool is_number = number == fmt::format("{}", entry) && read.ec == std::errc{};
      if (is_number && entry <= count) continue;
      complain(0, fmt::format(
                      "\"{}\" has {} {}, with numbers from 0 on, so that there is no entry \"{}\"; "
                      "the next one is {}.{}{}",
                      list, count, count == 1 ? "entry" : "entries", number, list, count,
                      key.substr(end)));
    }
  }

  // The value or its default; null when there is neither.
  const json* find(std::string_view key) const {
    const json* schema = find_key_schema(std::string(key));
    SLUICE_CHECK(schema != nullptr, "the code reads a key that the schema does not know");
    const json::json_pointer pointer = pointer_to(key);
    if (values.contains(pointer)) return &values[pointer];
    const auto fallback = schema->find("default");
    return fallback == schema->end() ? nullptr : &*fallback;
  }

  const json& get(std::string_view key) const {
    const json* value = find(key);
    SLUICE_CHECK(value != nullptr,
                 "the schema has no default for a key that is read without find_");
    return *value;
  }
};

ConfigDocument::ConfigDocument(std::string_view text, std::string name)
    : content_(std::make_unique<Content>()) {
  const FloatEnvironment environment;  // how a number is read depends on the rounding
  Content& content = *content_;
  content.name = std::move(name);
  content.text = text;
  const auto complain = [&content](std::size_t offset, const std::string& message) {
    throw Error(ErrorCode::kConfig, fmt::format("{}:{}: {}", content.name,
                                                line_and_column(content.text, offset), message));
  };
  // The parser takes it for the end of the text, and would ignore the rest.
  if (const std::size_t nul = content.text.find('\0'); nul != std::string::npos)
    complain(nul, "there is a NUL byte; a config is text");
  content.values = parse_config(content.text, "", content.places, complain);
  content.check();
}

ConfigDocument ConfigDocument::from_file(const std::string& path) {
  return ConfigDocument(text_of_file(path), path);
}

std::string ConfigDocument::text_of_file(const std::string& path) {
  std::string why;
  int error = 0;
  if (auto text = read_text_file(path, kConfigBytesMax, why, &error)) return *std::move(text);
  throw Error(ErrorCode::kInput, fmt::format("cannot read the config file \"{}\": {}{}", path, why,
                                             error == ENOENT ? "; name a file that exists" : ""));
}

ConfigDocument::ConfigDocument(ConfigDocument&&) noexcept = default;
ConfigDocument& ConfigDocument::operator=(ConfigDocument&&) noexcept = default;
ConfigDocument::~ConfigDocument() = default;

void ConfigDocument::set(std::string_view assignment) {
  const FloatEnvironment environment;
  const std::size_t equals = assignment.find('=');
  const std::string key(assignment.substr(0, equals));
  if (equals == std::string_view::npos || key.empty())
    throw Error(
        ErrorCode::kConfig,
        fmt::format("--set {}: it must be KEY=VALUE, such as memory.host=10MiB", assignment));
  const ParseComplaint complain = [&](std::size_t, const std::string& message) {
    throw Error(ErrorCode::kConfig, fmt::format("--set {}: {}", assignment, message));
  };
  content_->check_entry_numbers(key, complain);
  const json* schema = find_key_schema(key);
  if (schema == nullptr) {
    const std::size_t dot = key.rfind('.');
    const std::string parent = dot == std::string::npos ? "" : key.substr(0, dot);
    const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
    complain(0, fmt::format("unknown key \"{}\"{}", key, nearest_key_hint(name, parent)));
  }
  const std::string text(assignment.substr(equals + 1));
  const json plain = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const bool is_text =
      plain.is_discarded() || (schema->value("type", "") == "string" && !plain.is_string());
  KeyPlaces in_value;
  const json value = is_text ? json(text) : parse_config(text, key, in_value, complain);
  content_->assign(content_->values[pointer_to(key)], value, key, std::string(assignment));
  content_->check();
}

double ConfigDocument::number(std::string_view key) const {
  return content_->get(key).get<double>();
}
std::uint64_t ConfigDocument::integer(std::string_view key) const {
  return content_->get(key).get<std::uint64_t>();
}
bool ConfigDocument::boolean(std::string_view key) const {
  return content_->get(key).get<bool>();
}
std::string ConfigDocument::string(std::string_view key) const {
  return content_->get(key).get<std::string>();
}
std::vector<std::string> ConfigDocument::strings(std::string_view key) const {
  return content_->get(key).get<std::vector<std::string>>();
}

std::vector<double> ConfigDocument::numbers(std::string_view key) const {
  return content_->get(key).get<std::vector<double>>();
}

std::size_t ConfigDocument::entry_count(std::string_view key) const {
  return content_->get(key).size();
}

std::optional<double> ConfigDocument::find_number(std::string_view key) const {
  const json* value = content_->find(key);
  if (value == nullptr) return std::nullopt;
  return value->get<double>();
}

std::optional<std::uint64_t> ConfigDocument::find_integer(std::string_view key) const {
  const json* value = content_->find(key);
  if (value == nullptr) return std::nullopt;
  return value->get<std::uint64_t>();
}

std::optional<std::string> ConfigDocument::find_string(std::string_view key) const {
  const json* value = content_->find(key);
  if (value == nullptr || !value->is_string()) return std::nullopt;
  return value->get<std::string>();
}

std::optional<std::uint64_t> ConfigDocument::size_bytes(std::string_view key) const {
  const std::string text = string(key);
  if (text == "auto") return std::nullopt;
  return parse_size(text);
}

std::string ConfigDocument::json_of(std::string_view key) const {
  const json* value = content_->find(key);
  if (value == nullptr) return "null";
  // A VALUE of --set may have bytes that are no UTF-8, as a path may.
  return value->dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

std::string ConfigDocument::origin_of(std::string_view key) const {
  if (!content_->values.contains(pointer_to(key))) return "default";
  return content_->place_of(key);
}

void ConfigDocument::fail(std::string_view key, const std::string& message) const {
  content_->fail(key, message);
}

}  // namespace sluice
