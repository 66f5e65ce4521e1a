#include "tools/cli/option_checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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
  return fmt::format("\"{}\" is not a whole number in decimal digits, from 0 to {}", text,
                     UINT64_MAX);
}

std::string check_finite(std::string& text) {
  const std::optional<double> value = number_in<double>(text);
  if (value && std::isfinite(*value)) return {};
  return fmt::format("\"{}\" is not a finite number, such as 0.5 or 70e9", text);
}

bool has_type(const CLI::Option& option, const std::string& type) {
  return option.get_type_name().rfind(type, 0) == 0;
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

CLI::Validator count_suffix() {
  const auto change = [](std::string& text) -> std::string {
    constexpr std::string_view kSuffixes = "KMBT";
    constexpr std::array kExponents{"e3", "e6", "e9", "e12"};
    const std::size_t place = text.empty() ? std::string::npos : kSuffixes.find(text.back());
    const bool is_plain = text.find_first_of("eE") == std::string::npos;
    if (place != std::string::npos && is_plain) text.replace(text.size() - 1, 1, kExponents[place]);
    return {};
  };
  return {change, ""};
}

CLI::Validator rate_suffix() {
  const auto change = [](std::string& text) -> std::string {
    if (text.ends_with("/s")) text.resize(text.size() - 2);
    if (!text.empty() && std::string_view("KMGT").find(text.back()) != std::string_view::npos)
      text += "B";
    return {};
  };
  return {change, ""};
}

CLI::Validator memory_suffix() {
  const auto change = [](std::string& text) -> std::string {
    if (!text.empty() && std::string_view("KMGT").find(text.back()) != std::string_view::npos)
      text += "iB";
    return {};
  };
  return {change, ""};
}

void check_numbers(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    if (has_type(*option, "UINT")) option->check(CLI::Validator(check_whole, ""));
    if (has_type(*option, "FLOAT")) option->check(CLI::Validator(check_finite, ""));
  }
  for (CLI::App* const command : app.get_subcommands({})) check_numbers(*command);
}

std::string unknown_command(const CLI::App& app) {
  const CLI::App* parent = &app;  // the command before the one that is not known
  while (!parent->get_subcommands().empty()) parent = parent->get_subcommands().front();
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  std::vector<std::string> names;
  for (const CLI::App* const command : parent->get_subcommands({}))
    names.push_back(command->get_name());
  if (names.empty() || rest.empty() || rest.front().rfind('-', 0) == 0) return {};
  return fmt::format("unknown command \"{}\"; there are {}", rest.front(), fmt::join(names, ", "));
}

}  // namespace sluice
