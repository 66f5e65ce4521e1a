#include "tools/cli/usage.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/edit_distance.h"

namespace sluice {
namespace {

// A command and what one types to get there: "sluice bench io".
struct Place {
  const CLI::App* command;
  std::string name;
};

Place parsed_place(const CLI::App& app) {
  Place place{&app, app.get_name()};
  while (!place.command->get_subcommands().empty()) {
    place.command = place.command->get_subcommands().front();
    place.name += " " + place.command->get_name();
  }
  return place;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* const command : app.get_subcommands({}))
    names.push_back(command->get_name());
  return names;
}

std::vector<std::string> options_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// "; did you mean "train"?", or nothing where no name is near: at most a third of the letters are
// other ones, or the word is the beginning of a name.
std::string hint(std::string_view word, const std::vector<std::string>& names) {
  const std::string* nearest = nullptr;
  std::size_t nearest_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const bool is_beginning = word.size() > 3 && name.starts_with(word);
    const std::size_t distance = is_beginning ? 1 : edit_distance(word, name);
    if (distance >= nearest_distance) continue;
    nearest = &name;
    nearest_distance = distance;
  }
  return nearest == nullptr ? "" : fmt::format("; did you mean \"{}\"?", *nearest);
}

std::string unknown_command(const CLI::App& parent, const std::string& word) {
  const std::vector<std::string> names = command_names(parent);
  return fmt::format("unknown command \"{}\"{}; there are {}", word, hint(word, names),
                     fmt::join(names, ", "));
}

// Names an option that was given twice, and its values; CLI11 only counts them.
std::optional<std::string> surplus_value(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    const bool is_one = option->get_items_expected_max() == 1 &&
                        option->get_multi_option_policy() == CLI::MultiOptionPolicy::Throw;
    if (is_one && option->results().size() > 1)
      return fmt::format("{} is given {} times, with {}; give it once", option->get_name(),
                         option->results().size(), fmt::join(option->results(), " and "));
  }
  return std::nullopt;
}

}  // namespace

std::string usage_mistake(const CLI::App& app, const CLI::ParseError& error) {
  const Place place = parsed_place(app);
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const auto is_option = [](const std::string& word) { return word.size() > 1 && word[0] == '-'; };
  const auto option = std::ranges::find_if(rest, is_option);
  const std::string help = fmt::format("\n`{} --help` has more\n", place.name);
  if (option != rest.end()) {
    const std::string name = option->substr(0, option->find('='));
    return fmt::format("unknown option \"{}\"{}{}", name, hint(name, options_of(*place.command)),
                       help);
  }
  const bool has_commands = !place.command->get_subcommands({}).empty();
  if (has_commands && !rest.empty()) return unknown_command(*place.command, rest.front()) + "\n";
  if (has_commands && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr)
    return fmt::format("a command is missing: {}{}", fmt::join(command_names(*place.command), ", "),
                       help);
  if (!rest.empty())
    return fmt::format(
        "nothing takes {}; each option has its own word, as in --data FILE, and a "
        "setting is one word, --set KEY=VALUE{}",
        fmt::join(rest, " "), help);
  return surplus_value(*place.command).value_or(error.what()) + help;
}

std::string help_text(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  std::string name;
  for (const std::string& word : words) {
    const auto below = command->get_subcommands({});
    const auto found = std::ranges::find_if(
        below, [&](const CLI::App* known) { return known->get_name() == word; });
    if (found == below.end())
      throw Error(ErrorCode::kInvalidArgument,
                  below.empty()
                      ? fmt::format("{} {} has no commands of its own", name, command->get_name())
                      : unknown_command(*command, word));
    name += (name.empty() ? "" : " ") + command->get_name();
    command = *found;
  }
  return command->get_formatter()->make_help(
      command, words.empty() ? app.get_name() : name + " " + command->get_name(),
      CLI::AppFormatMode::Normal);
}

}  // namespace sluice
