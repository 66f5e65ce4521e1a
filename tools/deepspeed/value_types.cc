#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

// The number in a quoted text, whole or not; nothing for other text.
std::optional<OrderedJson> unquoted(const OrderedJson& value) {
  if (!value.is_string()) return std::nullopt;
  OrderedJson parsed =
      OrderedJson::parse(value.get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_number()) return std::nullopt;
  return parsed;
}

std::string wrong(const OrderedJson& value, const std::string& type) {
  if (value.is_array())
    return fmt::format(
        "it is the list {}, but must be {}: lists are for DeepSpeed's autotuner; "
        "write one of its values",
        value.dump(), type);
  return fmt::format("it is {}, but must be {}",
                     value.is_object() ? std::string("an object") : value.dump(), type);
}

std::optional<OrderedJson> as_bool(const OrderedJson& value, std::string& why, std::string& note) {
  if (value.is_boolean()) return value;
  const bool is_true = value == "true" || value == "True" || value == 1;
  if (!is_true && value != "false" && value != "False" && value != 0) {
    why = wrong(value, "true or false");
    return std::nullopt;
  }
  note = fmt::format("{} means {}", value.dump(), is_true);
  return is_true;
}

// DeepSpeed's largest default is Python's sys.maxsize, 2^63 - 1. Larger values fit no type here.
bool is_too_large(const OrderedJson& number) {
  if (number.is_number_unsigned()) return number.get<std::uint64_t>() > INT64_MAX;
  return std::abs(number.get<double>()) >= 0x1p63;
}

std::optional<OrderedJson> as_int(const OrderedJson& value, std::string& why, std::string& note) {
  const std::optional<OrderedJson> parsed = unquoted(value);
  const OrderedJson& number = parsed ? *parsed : value;
  if (number.is_number() && is_too_large(number)) {
    why = fmt::format("it is {}, but must be a whole number below 2^63", value.dump());
    return std::nullopt;
  }
  if (parsed && parsed->is_number_integer()) {
    note = fmt::format("{} means {}", value.dump(), parsed->dump());
    return parsed;
  }
  if (value.is_number_integer()) return value;
  if (!number.is_number()) {
    why = wrong(value, "a whole number");
    return std::nullopt;
  }
  const auto floating = number.get<double>();
  if (std::floor(floating) == floating && !parsed) return static_cast<std::int64_t>(floating);
  why = wrong(value, "a whole number") +
        fmt::format("; write {}", static_cast<std::int64_t>(std::ceil(floating)));
  return std::nullopt;
}

std::optional<OrderedJson> as_number(const OrderedJson& value, std::string& why,
                                     std::string& note) {
  if (value.is_number()) return value;
  if (const std::optional<OrderedJson> parsed = unquoted(value)) {
    note = fmt::format("{} means {}", value.dump(), parsed->dump());
    return parsed;
  }
  why = wrong(value, "a number");
  return std::nullopt;
}

std::optional<OrderedJson> as_enum(const DeepspeedKey& row, const OrderedJson& value,
                                   std::string& why) {
  for (const std::string& known : row.values) {
    if (value == known) return value;
  }
  why = wrong(value, fmt::format("one of \"{}\"", fmt::join(row.values, "\", \"")));
  return std::nullopt;
}

std::optional<OrderedJson> as_pair(const OrderedJson& value, std::string& why, std::string& note) {
  if (!value.is_array() || value.size() != 2) {
    why = fmt::format("it is {}, but must be a list of two numbers", value.dump());
    return std::nullopt;
  }
  const auto first = as_number(value[0], why, note);
  const auto second = as_number(value[1], why, note);
  if (!first || !second) return std::nullopt;
  return OrderedJson::array({*first, *second});
}

std::optional<OrderedJson> typed(const DeepspeedKey& row, const OrderedJson& value,
                                 std::string& why, std::string& note) {
  if (row.type == "bool") return as_bool(value, why, note);
  if (row.type == "int") return as_int(value, why, note);
  if (row.type == "number") return as_number(value, why, note);
  if (row.type == "enum") return as_enum(row, value, why);
  if (row.type == "pair") return as_pair(value, why, note);
  if ((row.type == "string" || row.type == "path") && !value.is_string()) {
    why = wrong(value, "a string");
    return std::nullopt;
  }
  return value;
}

double member_number(const OrderedJson& value, const char* name) {
  if (!value.is_object() || !value.contains(name) || !value[name].is_number()) return 0;
  return value[name].get<double>();
}

bool is_true(const OrderedJson& value) {
  return value == true || value == "true" || value == "True" || (value.is_number() && value != 0);
}

}  // namespace

std::optional<OrderedJson> value_of_type(const DeepspeedKey& row, const OrderedJson& value,
                                         std::string& why, std::string& note) {
  std::optional<OrderedJson> result = typed(row, value, why, note);
  if (!result || !result->is_number()) return result;
  const auto number = result->get<double>();
  if (row.least && number < *row.least) {
    why = fmt::format("it is {}, but must be at least {}", value.dump(), *row.least);
    return std::nullopt;
  }
  if (row.most && number > *row.most) {
    why = fmt::format("it is {}, but must be at most {}", value.dump(), *row.most);
    return std::nullopt;
  }
  return result;
}

namespace {

bool has_enabled(const OrderedJson& value) {
  if (!value.is_object()) return false;
  for (const auto& [key, inner] : value.items())
    if (key == "enabled" ? is_true(inner) : has_enabled(inner)) return true;
  return false;
}

}  // namespace

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return text;
}

bool is_refused_value(const DeepspeedKey& row, const OrderedJson& value) {
  const std::string& rule = row.refuse;
  if (rule == "always") return true;
  if (rule == "present") return !value.is_null() && value != false;
  if (rule == "true") return is_true(value);
  if (rule == "false") return !value.is_null() && !is_true(value);
  if (rule == "nonzero") {
    const OrderedJson number = unquoted(value).value_or(value);
    return number.is_number() && number != 0;
  }
  if (rule == "names") return !value.is_null() && value != "auto" && !value.empty();
  if (rule == ">1") return !value.is_number() || value > 1;
  if (rule == "autotp_size>1") return member_number(value, "autotp_size") > 1;
  if (rule == "stages>1") return member_number(value, "stages") > 1;
  if (rule == "enabled")
    return is_true(value.is_object() ? value.value("enabled", OrderedJson()) : value);
  if (rule == "any enabled") return has_enabled(value);
  if (rule == "not -1") return !value.is_null() && unquoted(value).value_or(value) != -1;
  // "fp16" or "sum", which DeepSpeed reads in any case.
  return value.is_string() && lower(value.get<std::string>()) == rule;
}

}  // namespace sluice
