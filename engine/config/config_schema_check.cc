#include "engine/config/config_schema_check.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/edit_distance.h"

namespace sluice {
namespace {

using nlohmann::json;

std::string join_key(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + "." + name;
}

// A VALUE of --set may have bytes that are no UTF-8, as a path may.
std::string in_message(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

bool is_entry_number(std::string_view word) {
  return !word.empty() && word.find_first_not_of("0123456789") == std::string_view::npos;
}

bool has_type(const json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "integer") return value.is_number_integer();
  return value.is_number();
}

void check_range(const json& value, const json& schema, const std::string& key,
                 const SchemaComplaint& complain) {
  const double number = value.get<double>();
  const auto bound = [&](const char* name, auto&& inside, const char* word) {
    const auto limit = schema.find(name);
    if (limit != schema.end() && !inside(number, limit->get<double>()))
      complain(key, fmt::format("\"{}\" is {}, but must be {} {}", key, in_message(value), word,
                                limit->dump()));
  };
  bound("minimum", std::greater_equal<double>{}, "at least");
  bound("exclusiveMinimum", std::greater<double>{}, "more than");
  bound("maximum", std::less_equal<double>{}, "at most");
  bound("exclusiveMaximum", std::less<double>{}, "less than");
}

void check_string(const json& value, const json& schema, const std::string& key,
                  const SchemaComplaint& complain) {
  // Code that takes NUL for the end of the string (as with paths) would use another string.
  if (value.get_ref<const std::string&>().find('\0') != std::string::npos)
    complain(key, fmt::format("\"{}\" is {}, with a NUL character in it", key, in_message(value)));
  const auto allowed = schema.find("enum");
  if (allowed != schema.end() &&
      std::find(allowed->begin(), allowed->end(), value) == allowed->end()) {
    std::vector<std::string> names;
    for (const json& name : *allowed) names.push_back(name.dump());
    complain(key, fmt::format("\"{}\" is {}, but must be one of {}", key, in_message(value),
                              fmt::join(names, ", ")));
  }
  if (schema.value("format", "") == "size" && value != "auto") {
    try {
      (void)parse_size(value.get_ref<const std::string&>());
    } catch (const Error& error) {
      complain(key, fmt::format("\"{}\": {}; \"auto\" is allowed too", key, error.what()));
    }
  }
}

void check_object(const json& value, const json& schema, const std::string& key,
                  const SchemaComplaint& complain) {
  const json& properties = schema.at("properties");
  for (const auto& [name, member] : value.items()) {
    const std::string member_key = join_key(key, name);
    const auto known = properties.find(name);
    if (known != properties.end()) check_against_schema(member, *known, member_key, complain);
  }
}

void collect_unknown(const json& value, const json& schema, const std::string& key,
                     std::vector<UnknownKey>& unknown) {
  for (const json& choice : schema.value("anyOf", json::array())) {
    if (has_type(value, choice.at("type").get<std::string>()))
      return collect_unknown(value, choice, key, unknown);
  }
  if (value.is_object() && schema.contains("properties")) {
    for (const auto& [name, member] : value.items()) {
      const auto known = schema["properties"].find(name);
      if (known == schema["properties"].end())
        unknown.push_back({.key = join_key(key, name), .hint = nearest_key_hint(name, key)});
      else
        collect_unknown(member, *known, join_key(key, name), unknown);
    }
  }
  if (value.is_array() && schema.contains("items")) {
    for (std::size_t i = 0; i < value.size(); ++i)
      collect_unknown(value[i], schema["items"], join_key(key, std::to_string(i)), unknown);
  }
}

// How a value is written that has the wrong type.
std::string spelling_hint(const json& value, const std::string& type) {
  if (type == "array" && !value.is_structured())
    return fmt::format("; write [{}]", in_message(value));
  if (type == "string" && value.is_number())
    return fmt::format("; write \"{}\"", in_message(value));
  return {};
}

// Alternatives of different types.
void check_choices(const json& value, const json& choices, const std::string& key,
                   const SchemaComplaint& complain) {
  std::vector<std::string> types;
  for (const json& choice : choices) {
    types.push_back(choice.at("type").get<std::string>());
    if (has_type(value, types.back())) return check_against_schema(value, choice, key, complain);
  }
  complain(key, fmt::format("\"{}\" is {}, but must be of type {}", key,
                            value.is_structured() ? value.type_name() : in_message(value),
                            fmt::join(types, " or ")));
}

// Every key of the schema in dotted form. Those in an entry of a list are the first entry's.
void collect_keys(const json& schema, const std::string& parent, std::vector<std::string>& keys) {
  const auto properties = schema.find("properties");
  if (properties == schema.end()) {
    if (schema.contains("items")) collect_keys(schema["items"], join_key(parent, "0"), keys);
    return;
  }
  for (const auto& [name, member] : properties->items()) {
    const std::string key = join_key(parent, name);
    keys.push_back(key);
    collect_keys(member, key, keys);
  }
}

// The names of these keys in other programs, where no letters tell.
constexpr std::pair<std::string_view, std::string_view> kUsualNames[] = {
    {"lr", "optimizer.learning_rate"},
    {"batch_size", "batch.sequences"},
    {"max_steps", "run.steps"},
    {"max_grad_norm", "optimizer.clip_norm"},
    {"gradient_clipping", "optimizer.clip_norm"},
    {"dtype", "precision.parameters"},
    {"gradient_accumulation_steps", "batch.micro_batches"}};

// "run.steps" as {"run": {"steps": ...}}.
std::string in_sections(std::string_view key) {
  const std::size_t dot = key.find('.');
  if (dot == std::string_view::npos) return fmt::format("{{\"{}\": ...}}", key);
  return fmt::format("{{\"{}\": {}}}", key.substr(0, dot), in_sections(key.substr(dot + 1)));
}

}  // namespace

const json& config_schema() {
  // Never destroyed: a program may make an engine, or close one, at its very end.
  static const json* const schema = new json(json::parse(kConfigSchemaText));
  return *schema;
}

std::vector<std::string> config_keys() {
  std::vector<std::string> keys;
  collect_keys(config_schema(), "", keys);
  std::erase_if(keys, [](const std::string& key) {
    return find_key_schema(key)->contains("properties") || key.find(".0.") != std::string::npos;
  });
  return keys;
}

const json* find_key_schema(const std::string& key) {
  const json* schema = &config_schema();
  std::size_t begin = 0;
  while (begin <= key.size()) {
    const std::size_t end = std::min(key.find('.', begin), key.size());
    if (schema->value("type", "") == "array") {
      if (!is_entry_number(std::string_view(key).substr(begin, end - begin))) return nullptr;
      schema = &schema->at("items");
      begin = end + 1;
      continue;
    }
    const auto properties = schema->find("properties");
    if (properties == schema->end()) return nullptr;
    const auto member = properties->find(key.substr(begin, end - begin));
    if (member == properties->end()) return nullptr;
    schema = &*member;
    begin = end + 1;
  }
  return schema;
}

void check_against_schema(const json& value, const json& schema, const std::string& key,
                          const SchemaComplaint& complain) {
  if (const auto choices = schema.find("anyOf"); choices != schema.end())
    return check_choices(value, *choices, key, complain);
  const std::string type = schema.at("type").get<std::string>();
  if (!has_type(value, type)) {
    const std::string what = key.empty() ? "the document" : "\"" + key + "\"";
    complain(key, fmt::format("{} is {}, but must be of type {}{}", what,
                              value.is_structured() ? value.type_name() : in_message(value), type,
                              spelling_hint(value, type)));
  }
  if (type == "object") check_object(value, schema, key, complain);
  if (type == "string") check_string(value, schema, key, complain);
  if (type == "integer" || type == "number") check_range(value, schema, key, complain);
  if (type == "array") {
    if (value.size() < schema.value("minItems", std::size_t{0}))
      complain(key, fmt::format("\"{}\" is empty, but must have at least {} entry", key,
                                schema["minItems"].dump()));
    for (std::size_t i = 0; i < value.size(); ++i) {
      const std::string entry = value[i].is_object() ? join_key(key, std::to_string(i)) : key;
      check_against_schema(value[i], schema.at("items"), entry, complain);
    }
  }
}

std::vector<UnknownKey> unknown_keys(const json& document) {
  std::vector<UnknownKey> unknown;
  collect_unknown(document, config_schema(), "", unknown);
  return unknown;
}

std::string nearest_key_hint(const std::string& unknown, const std::string& parent) {
  std::vector<std::string> keys;
  collect_keys(config_schema(), "", keys);
  const std::string full = join_key(parent, unknown);
  if (find_key_schema(full) != nullptr)  // in a file, a dot is part of the name
    return fmt::format("; write {}", in_sections(unknown));
  for (const auto& [usual, ours] : kUsualNames)
    if (unknown == usual || unknown.ends_with(fmt::format(".{}", usual)))
      return fmt::format("; did you mean \"{}\"?", ours);
  const std::string* nearest = nullptr;
  std::size_t nearest_distance = 0;
  for (const std::string& key : keys) {
    // Near as written, or near in its last word in another section.
    const std::size_t distance = std::min(
        edit_distance(full, key), edit_distance(unknown, key.substr(key.rfind('.') + 1)) + 1);
    if (nearest == nullptr || distance < nearest_distance) {
      nearest = &key;
      nearest_distance = distance;
    }
  }
  // As for commands and options: beyond this, the nearest word is another one.
  if (nearest_distance > std::max<std::size_t>(2, unknown.size() / 3)) return "";
  // In an entry of a list, the key of that entry.
  const std::size_t dot = nearest->rfind('.');
  const json* section = find_key_schema(parent);
  if (section != nullptr && dot != std::string::npos &&
      section == find_key_schema(nearest->substr(0, dot)))
    return fmt::format("; did you mean \"{}\"?", join_key(parent, nearest->substr(dot + 1)));
  return fmt::format("; did you mean \"{}\"?", *nearest);
}

}  // namespace sluice
