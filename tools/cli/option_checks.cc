#include "tools/cli/option_checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

template <class Number>
std::optional<Number> number_in(const std::string& text) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

std::string check_whole(std::string& text) {
  const bool is_octal = text.size() > 1 && text.front() == '0';
  if (!is_octal && number_in<std::uint64_t>(text)) return {};
  return fmt::format(
      "\"{}\" is not a whole number in decimal digits (such as 64, 10K or 8B), from 0 "
      "to {}",
      text, UINT64_MAX);
}

std::string check_finite(std::string& text) {
  const std::optional<double> value = number_in<double>(text);
  if (value && std::isfinite(*value)) return {};
  return fmt::format("\"{}\" is not a finite number, such as 0.5, 70e9 or 70B", text);
}

bool are_digits(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// "1.5M" becomes "1500000": in digits, since 0.067 * 1e9 in double is no whole number. Anything
// else stays, for the checks behind to refuse.
std::string expand_suffix(std::string& text) {
  constexpr std::string_view kSuffixes = "KMBGTkmbgt";
  constexpr std::array<std::size_t, 5> kZeros{3, 6, 9, 9, 12};
  const std::size_t place = text.empty() ? std::string::npos : kSuffixes.find(text.back());
  if (place == std::string::npos) return {};
  std::string whole = text.substr(0, text.size() - 1);
  const std::size_t point = std::min(whole.find('.'), whole.size());
  std::string fraction = whole.substr(std::min(point + 1, whole.size()));
  whole.resize(point);
  if (whole.empty() || !are_digits(whole) || !are_digits(fraction)) return {};
  const std::size_t zeros = kZeros[place % kZeros.size()];
  if (fraction.size() > zeros) return {};
  fraction.append(zeros - fraction.size(), '0');
  whole += fraction;
  const std::size_t first = whole.find_first_not_of('0');
  text = first == std::string::npos ? "0" : whole.substr(first);
  return {};
}

bool has_type(const CLI::Option& option, const std::string& type) {
  return option.get_type_name().rfind(type, 0) == 0;
}

// A transform goes before all that is there, such as a range, so the last one added comes first.
void add_first(CLI::Option& option, std::string (*check)(std::string&)) {
  option.transform(CLI::Validator(check, ""));
  option.transform(CLI::Validator(expand_suffix, ""));
}

}  // namespace

CLI::Validator between(double least, double most) {
  const auto check = [least, most](std::string& text) -> std::string {
    const std::optional<double> value = number_in<double>(text);
    if (value && *value >= least && *value <= most) return {};
    return fmt::format("\"{}\" is not a number from {:g} to {:g}", text, least, most);
  };
  return {check, fmt::format("[{:g}, {:g}]", least, most)};
}

CLI::Validator one_of(std::vector<std::pair<std::string, int>> values) {
  std::string names;
  for (const auto& [name, number] : values) names += (names.empty() ? "" : ",") + name;
  const auto change = [values = std::move(values), names](std::string& text) -> std::string {
    for (const auto& [name, number] : values) {
      if (CLI::detail::to_lower(text) != CLI::detail::to_lower(name)) continue;
      text = std::to_string(number);
      return {};
    }
    return fmt::format("\"{}\" is none of {}", text, names);
  };
  return {change, "{" + names + "}"};
}

CLI::Validator is_size() {
  const auto check = [](std::string& text) -> std::string {
    try {
      if (parse_size(text) != 0) return {};
      return fmt::format("\"{}\" is a size of 0; it must be larger", text);
    } catch (const Error& error) {
      return error.what();
    }
  };
  return {check, ""};
}

CLI::Validator rate_suffix() {
  const auto change = [](std::string& text) -> std::string {
    if (text.ends_with("/s")) text.resize(text.size() - 2);
    if (!text.empty() && std::string_view("KMGTkmgt").find(text.back()) != std::string_view::npos)
      text += "B";
    return {};
  };
  return {change, ""};
}

void check_numbers(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    if (has_type(*option, "UINT")) add_first(*option, check_whole);
    if (has_type(*option, "FLOAT")) add_first(*option, check_finite);
  }
  for (CLI::App* const command : app.get_subcommands({})) check_numbers(*command);
}

void refuse_empty_texts(CLI::App& app) {
  const auto check = [](const std::string& text) -> std::string {
    return text.empty() ? "it is empty; give a value, or leave the option out" : "";
  };
  for (CLI::Option* const option : app.get_options()) {
    const bool takes_value = option->nonpositional() && option->get_items_expected_max() > 0;
    if (takes_value && !option->get_name().ends_with("prompt"))
      option->check(CLI::Validator(check, ""));
  }
  for (CLI::App* const command : app.get_subcommands({})) refuse_empty_texts(*command);
}

std::optional<std::string> option_without_value(std::span<const char* const> words) {
  for (const std::string_view word : words) {
    if (word == "--") break;
    if (word.size() > 3 && word.starts_with("--") && word.find('=') == word.size() - 1)
      return std::string(word);
  }
  return std::nullopt;
}

}  // namespace sluice
