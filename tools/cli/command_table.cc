#include "tools/cli/command_table.h"

#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/version.h>
#include "tools/cli/help_format.h"

namespace sluice {
namespace {

struct Command {
  const CLI::App* app;
  std::string path;  // "sluice bench io"
};

void add_commands_below(const CLI::App& app, const std::string& path, std::vector<Command>& all) {
  all.push_back({&app, path});
  for (const CLI::App* const below : app.get_subcommands({}))
    add_commands_below(*below, path + " " + below->get_name(), all);
}

std::vector<Command> commands_of(const CLI::App& app) {
  std::vector<Command> all;
  add_commands_below(app, app.get_name(), all);
  return all;
}

// Text that roff prints as it is: it would take hyphens for breaks, and lines that begin with a dot
// or an apostrophe for macros.
std::string roff(std::string_view text) {
  std::string escaped;
  for (const char letter : text) {
    const bool begins_line = escaped.empty() || escaped.back() == '\n';
    if (begins_line && (letter == '.' || letter == '\'')) escaped += "\\&";
    if (letter == '\\')
      escaped += "\\e";
    else if (letter == '-')
      escaped += "\\-";
    else
      escaped += letter;
  }
  return escaped;
}

std::string option_text(const CLI::Option& option) {
  const bool is_positional = option.get_positional();
  std::string names = option.get_name(is_positional, /*all_options=*/!is_positional);
  names = names.substr(0, names.find('{'));  // a flag's value where none is written
  const std::string value = is_positional ? "" : value_word(option);
  return fmt::format(".TP\n.BI \"{} \" \"{}\"\n{}.\n", roff(names), roff(value),
                     roff(full_description(option)));
}

// The words that may follow a command: commands below it and its long options, with descriptions.
std::vector<std::pair<std::string, std::string>> words_after(const CLI::App& app) {
  std::vector<std::pair<std::string, std::string>> words;
  for (const CLI::App* const below : app.get_subcommands({}))
    words.emplace_back(below->get_name(), below->get_description());
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& name : option->get_lnames())
      words.emplace_back("--" + name, option->get_description());
  }
  return words;
}

// A word of zsh and of fish, whatever letters `text` has.
std::string shell_word(std::string_view text) {
  std::string result = "'";
  for (const char letter : text) {
    if (letter == '\'')
      result += "'\\''";
    else
      result += letter == '\n' ? ' ' : letter;
  }
  return result + "'";
}

// The commands below sluice, as patterns of a shell's `case`.
std::string paths_of(const CLI::App& app, std::string_view separator) {
  std::vector<std::string> paths;
  for (const Command& command : commands_of(app)) {
    if (command.app != &app) paths.push_back(fmt::format("\"{}\"", command.path));
  }
  return fmt::format("{}", fmt::join(paths, separator));
}

}  // namespace

std::string man_page(const CLI::App& app) {
  std::string page = fmt::format(
      ".TH SLUICE 1 \"\" \"sluice {}\" \"User Commands\"\n.SH NAME\nsluice \\- {}\n.SH SYNOPSIS\n"
      ".B sluice\n.I COMMAND\n[options]\n.SH COMMANDS\n",
      roff(kVersion), roff("trains models whose state is larger than memory"));
  for (const Command& command : commands_of(app)) {
    if (command.app != &app)
      page +=
          fmt::format(".SS {}\n{}.\n", roff(command.path), roff(command.app->get_description()));
    for (const CLI::Option* const option : command.app->get_options()) page += option_text(*option);
  }
  return page;
}

std::string bash_completion(const CLI::App& app) {
  std::string cases;
  for (const Command& command : commands_of(app)) {
    std::vector<std::string> words;
    for (auto& [word, description] : words_after(*command.app)) words.push_back(std::move(word));
    cases += fmt::format("    \"{}\") words=\"{}\";;\n", command.path, fmt::join(words, " "));
  }
  return fmt::format(
      "# Completion of sluice for bash, made by `sluice completion`.\n"
      "_sluice() {{\n"
      "  local path=sluice words= i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"$path ${{COMP_WORDS[i]}}\" in\n"
      "    {}) path=\"$path ${{COMP_WORDS[i]}}\";;\n"
      "    esac\n"
      "  done\n"
      "  case \"$path\" in\n"
      "{}"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"${{COMP_WORDS[COMP_CWORD]}}\"))\n"
      "}}\n"
      "complete -o default -F _sluice sluice\n",
      paths_of(app, "|"), cases);
}

std::string zsh_completion(const CLI::App& app) {
  std::string cases;
  for (const Command& command : commands_of(app)) {
    cases += fmt::format("    \"{}\") offers=(", command.path);
    for (const auto& [word, description] : words_after(*command.app))
      cases += "\n      " + shell_word(word + ":" + description);
    cases += ");;\n";
  }
  // The file is read by zsh's loader, which then calls it as the function, or by `source`.
  return fmt::format(
      "#compdef sluice\n"
      "# Completion of sluice for zsh, made by `sluice completion zsh`.\n"
      "_sluice() {{\n"
      "  local command=sluice i\n"
      "  local -a offers\n"
      "  for ((i = 2; i < CURRENT; ++i)); do\n"
      "    case \"$command ${{words[i]}}\" in\n"
      "    {}) command=\"$command ${{words[i]}}\";;\n"
      "    esac\n"
      "  done\n"
      "  case \"$command\" in\n"
      "{}"
      "  esac\n"
      "  _describe 'word' offers || _files\n"
      "}}\n"
      "if [[ $funcstack[1] == _sluice ]]; then _sluice \"$@\"; else compdef _sluice sluice; fi\n",
      paths_of(app, "|"), cases);
}

std::string fish_completion(const CLI::App& app) {
  std::string offers;
  for (const Command& command : commands_of(app)) {
    for (const auto& [word, description] : words_after(*command.app)) {
      const bool is_option = word.starts_with("--");
      offers += fmt::format("complete -c sluice -n '__sluice_is_at \"{}\"' {} {} -d {}\n",
                            command.path, is_option ? "-l" : "-a",
                            is_option ? word.substr(2) : word, shell_word(description));
    }
  }
  return fmt::format(
      "# Completion of sluice for fish, made by `sluice completion fish`.\n"
      "function __sluice_is_at\n"
      "  set -l command sluice\n"
      "  for word in (commandline -opc)[2..-1]\n"
      "    switch \"$command $word\"\n"
      "      case {}\n"
      "        set command \"$command $word\"\n"
      "    end\n"
      "  end\n"
      "  test $command = $argv[1]\n"
      "end\n"
      "{}",
      paths_of(app, " "), offers);
}

}  // namespace sluice
