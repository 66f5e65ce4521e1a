#include "tools/cli/help_format.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/cli/terminal.h"

namespace sluice {
namespace {

constexpr std::size_t kDescriptionColumn = 30;
constexpr std::size_t kColumnsMax = 100;  // longer lines are hard to read
// No user meets a limit beyond this one.
constexpr double kShownLimit = 1e12;

// The parser writes a type and what its checks say of themselves as one text:
// "UINT:INT in [1 - 64]", "FLOAT:[0, 1e+30]", "TEXT:{full,half}", "SIZE".
// A word such as "NAME[:COUNT]" may have a colon of its own.
std::size_t end_of_word(std::string_view type) {
  const std::size_t bracket = type.find("[:");
  const std::size_t from = bracket == std::string_view::npos ? 0 : type.find(']', bracket);
  return std::min(type.find(':', from), type.size());
}

std::string_view check_text(std::string_view type) {
  return type.substr(std::min(end_of_word(type) + 1, type.size()));
}

std::optional<std::string> choices_of(std::string_view checks) {
  const std::size_t begin = checks.find('{'), end = checks.rfind('}');
  if (begin == std::string_view::npos || end == std::string_view::npos) return std::nullopt;
  std::string choices(checks.substr(begin + 1, end - begin - 1));
  std::ranges::replace(choices, ',', '|');
  return choices;
}

// "a|b" as "a, b", which a line can be broken in.
std::string spaced(std::string_view choices) {
  std::string text;
  for (const char letter : choices)
    text += letter == '|' ? std::string(", ") : std::string(1, letter);
  return text;
}

std::string limit_text(double limit) {
  return std::abs(limit) >= 1e15 || std::floor(limit) != limit
             ? fmt::format("{:g}", limit)
             : fmt::format("{}", static_cast<std::int64_t>(limit));
}

// "[1 - 64]" or "[0, 1e+30]" as "1 to 64" or "0 or more".
std::optional<std::string> range_of(std::string_view checks) {
  const std::size_t begin = checks.find('['), end = checks.find(']');
  if (begin == std::string_view::npos || end == std::string_view::npos) return std::nullopt;
  const std::string_view inner = checks.substr(begin + 1, end - begin - 1);
  double least = 0, most = 0;
  const auto first = std::from_chars(inner.data(), inner.data() + inner.size(), least);
  const char* rest = first.ptr;
  const std::string_view dash = " - ", comma = ", ";
  for (const std::string_view between : {dash, comma}) {
    const std::string_view left(rest, static_cast<std::size_t>(inner.end() - rest));
    if (left.starts_with(between)) rest += between.size();
  }
  const auto second = std::from_chars(rest, inner.data() + inner.size(), most);
  if (first.ec != std::errc() || second.ec != std::errc()) return std::nullopt;
  if (most >= kShownLimit) return limit_text(least) + " or more";
  return limit_text(least) + " to " + limit_text(most);
}

std::string names_of(const std::set<CLI::Option*>& options) {
  std::vector<std::string> names;
  for (const CLI::Option* const option : options) names.push_back(option->get_name());
  std::ranges::sort(names);
  return fmt::format("{}", fmt::join(names, ", "));
}

// A longer list stands in the description.
constexpr std::size_t kChoicesBeside = 20;

std::string one_value(std::string_view type) {
  const auto choices = choices_of(check_text(type));
  if (choices && choices->size() <= kChoicesBeside) return *choices;
  if (choices) return "NAME";
  const std::string_view word = type.substr(0, end_of_word(type));
  if (word == "UINT" || word == "INT") return "N";
  return word == "FLOAT" ? "NUMBER" : std::string(word);
}

// The default of an option that may be repeated is "[a,b]" to the parser.
std::string default_of(const CLI::Option& option) {
  const std::string value = option.get_default_str();
  if (!value.starts_with('[') || !value.ends_with(']')) return value;
  std::string values = value.substr(1, value.size() - 2);
  std::ranges::replace(values, ',', '|');
  return spaced(values);
}

}  // namespace

std::string value_word(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return {};
  const std::string type = option.get_type_name();
  const std::string value = one_value(type);
  if (value.empty()) return {};
  if (option.get_expected_max() == CLI::detail::expected_max_vector_size) return value + " ...";
  std::string words = value;
  for (int i = 1; i < option.get_expected_min(); ++i) words += " " + value;
  return words;
}

std::string full_description(const CLI::Option& option) {
  std::vector<std::string> facts;
  const std::string description = option.get_description();
  if (option.get_items_expected_max() != 0) {
    const std::string type = option.get_type_name();
    if (const auto range = range_of(check_text(type))) facts.push_back(*range);
    const auto choices = choices_of(check_text(type));
    if (choices && choices->size() > kChoicesBeside) facts.push_back(spaced(*choices));
    const std::string value = default_of(option);
    const bool is_said = description.find("default") != std::string::npos;
    if (!value.empty() && value != "\"\"" && !is_said) facts.push_back("default " + value);
  }
  if (option.get_required()) facts.emplace_back("required");
  if (!option.get_needs().empty()) facts.push_back("with " + names_of(option.get_needs()));
  if (!option.get_excludes().empty())
    facts.push_back("not with " + names_of(option.get_excludes()));
  if (facts.empty()) return description;
  const std::string all = fmt::format("{})", fmt::join(facts, "; "));
  if (description.ends_with(')')) return description.substr(0, description.size() - 1) + "; " + all;
  return description + " (" + all;
}

namespace {

// A head and what it means, beside each other or below each other.
std::string entry(const std::string& head, const std::string& meaning) {
  const std::size_t columns = std::min(terminal_columns(STDOUT_FILENO), kColumnsMax);
  // fitted() places what does not fit below the last column, which two spaces precede.
  if (head.size() + 2 <= kDescriptionColumn)
    return fitted(fmt::format("{:{}}{}", head, kDescriptionColumn, meaning), columns) + "\n";
  return head + "\n" + fitted(fmt::format("{:{}}{}", "", kDescriptionColumn, meaning), columns) +
         "\n";
}

}  // namespace

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  std::string names = make_option_name(option, is_positional);
  names = names.substr(0, names.find('{'));  // a flag's value where none is written
  const std::string value = value_word(*option);
  if (is_positional && value.starts_with(names))
    return entry("  " + value, full_description(*option));
  return entry("  " + names + (value.empty() ? "" : " " + value), full_description(*option));
}

std::string HelpFormat::make_description(const CLI::App* app) const {
  const std::size_t columns = std::min(terminal_columns(STDOUT_FILENO), kColumnsMax);
  return fitted(app->get_description(), columns) + "\n";
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  return entry("  " + command->get_display_name(), command->get_description());
}

}  // namespace sluice
