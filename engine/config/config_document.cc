#include <sluice/config_document.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <map>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/float_environment.h"
#include "base/text_file.h"
#include "engine/config/config_schema_check.h"

namespace sluice {
namespace {

using nlohmann::json;

// Far more than any config has, and far less than a wrong file could take of memory.
constexpr std::size_t kConfigBytesMax = 1 << 20;
// The schema has four.
constexpr std::size_t kNestingMax = 16;

// An input iterator that records how far the parser has read, because the library does not keep the
// places of keys.
class TrackingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackingIterator(const char* position, const char** reached)
      : position_(position), reached_(reached) {}
  reference operator*() const { return *position_; }
  TrackingIterator& operator++() {
    *reached_ = ++position_;
    return *this;
  }
  TrackingIterator operator++(int) {
    TrackingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackingIterator& other) const { return position_ == other.position_; }
  bool operator!=(const TrackingIterator& other) const { return position_ != other.position_; }

 private:
  const char* position_;
  const char** reached_;
};

// Where a key or a list entry begins in the text, by dotted key.
using Places = std::map<std::string, std::size_t, std::less<>>;

std::string line_and_column(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t line_begin = before.rfind('\n') + 1;  // npos + 1 = 0
  return fmt::format("{}:{}", line, before.size() - line_begin + 1);
}

// Builds the document and notes where each key stands; a key given twice is an error.
class DocumentBuilder : public json::json_sax_t {
 public:
  DocumentBuilder(std::string_view text, const char** reached, Places& places)
      : text_(text), reached_(reached), places_(places) {}

  bool null() override { return place(nullptr); }
  bool boolean(bool value) override { return place(value); }
  bool number_integer(json::number_integer_t value) override { return place(value); }
  bool number_unsigned(json::number_unsigned_t value) override { return place(value); }
  bool number_float(json::number_float_t value, const std::string&) override {
    return place(value);
  }
  bool string(std::string& value) override { return place(value); }
  bool binary(json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    key_ = name;
    const std::string full = path(name);
    const auto end =
        static_cast<std::size_t>(*reached_ - text_.data());  // after the closing quote of the key
    const std::size_t begin = text_.rfind('"', end - 2);
    if (!places_.emplace(full, begin).second)
      throw Error(ErrorCode::kConfig, fmt::format("{}: key \"{}\" is given twice",
                                                  line_and_column(text_, begin), full));
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const json::exception& error) override {
    std::string why = error.what();  // "[json.exception.parse_error.101] parse error at line 1,
                                     // column 2: syntax error while ..."
    const std::size_t detail = why.find(": ");
    if (detail != std::string::npos) why = why.substr(detail + 2);
    throw Error(ErrorCode::kConfig,
                fmt::format("{}: {}; a config is JSON, and may have comments",
                            line_and_column(text_, position == 0 ? 0 : position - 1), why));
  }

  json take() { return std::move(root_); }

 private:
  std::string path(const std::string& name) const {
    std::string full;
    for (const auto& [value, key] : open_) full += key.empty() ? "" : key + ".";
    return full + name;
  }

  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back().first;
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[key_] = std::move(value));
  }

  bool open(json value) {
    if (open_.size() == kNestingMax)
      throw Error(
          ErrorCode::kConfig,
          fmt::format(
              "{}: it is nested more than {} levels deep; a config has at most four",
              line_and_column(text_, static_cast<std::size_t>(*reached_ - text_.data()) - 1),
              kNestingMax));
    std::string key = open_.empty() ? "" : key_;
    if (!open_.empty() && open_.back().first->is_array())
      key = std::to_string(open_.back().first->size());
    open_.emplace_back(place(std::move(value)), std::move(key));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const char** reached_;
  Places& places_;
  json root_;
  std::vector<std::pair<json*, std::string>> open_;
  std::string key_;
};

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
  Places places;
  std::map<std::string, std::string, std::less<>> assignments;  // key -> the --set that gave it

  std::string place_of(std::string_view key) const {
    const auto assignment = assignments.find(key);
    if (assignment != assignments.end()) return "--set " + assignment->second;
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

  // For --set: an entry of a list has the number of one that is there, or the next. A larger one
  // would fill the list with as many entries of nothing.
  void check_entry_numbers(const std::string& key) const {
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
      fail(key, fmt::format(
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
  const char* reached = content.text.data();
  // The parser takes it for the end of the text, and would ignore the rest.
  if (const std::size_t nul = content.text.find('\0'); nul != std::string::npos)
    throw Error(ErrorCode::kConfig, fmt::format("{}:{}: there is a NUL byte; a config is text",
                                                content.name, line_and_column(content.text, nul)));
  DocumentBuilder builder(content.text, &reached, content.places);
  const char* end = content.text.data() + content.text.size();
  try {
    json::sax_parse(TrackingIterator(content.text.data(), &reached),
                    TrackingIterator(end, &reached), &builder, json::input_format_t::json,
                    /*strict=*/true, /*ignore_comments=*/true);
  } catch (const Error& error) {
    throw Error(ErrorCode::kConfig, content.name + ":" + error.what());
  }
  content.values = builder.take();
  content.check();
}

ConfigDocument ConfigDocument::from_file(const std::string& path) {
  return ConfigDocument(text_of_file(path), path);
}

std::string ConfigDocument::text_of_file(const std::string& path) {
  std::string why;
  if (auto text = read_text_file(path, kConfigBytesMax, why)) return *std::move(text);
  std::error_code no_answer;
  const bool is_missing = !std::filesystem::exists(path, no_answer);
  throw Error(ErrorCode::kInput, fmt::format("cannot read the config file \"{}\": {}{}", path, why,
                                             is_missing ? "; name a file that exists" : ""));
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
  content_->assignments[key] = assignment;
  content_->check_entry_numbers(key);
  const json* schema = find_key_schema(key);
  if (schema == nullptr) {
    const std::size_t dot = key.rfind('.');
    const std::string parent = dot == std::string::npos ? "" : key.substr(0, dot);
    const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
    content_->fail(key, fmt::format("unknown key \"{}\"{}", key, nearest_key_hint(name, parent)));
  }
  const std::string text(assignment.substr(equals + 1));
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const bool is_text =
      value.is_discarded() || (schema->value("type", "") == "string" && !value.is_string());
  content_->values[pointer_to(key)] = is_text ? json(text) : value;
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
  return value == nullptr ? "null" : value->dump();
}

std::string ConfigDocument::origin_of(std::string_view key) const {
  if (!content_->values.contains(pointer_to(key))) return "default";
  return content_->place_of(key);
}

void ConfigDocument::fail(std::string_view key, const std::string& message) const {
  content_->fail(key, message);
}

}  // namespace sluice
