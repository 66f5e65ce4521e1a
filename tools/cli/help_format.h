// The texts of --help. Each text shows all options and the values that each option takes. The lines
// fit the terminal's width. The texts do not come from the parser. The parser's own texts would
// show types and ranges with the names from the code.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// Returns the word that stands for the value of `option`, such as "N", "SIZE" or "full|half".
// Returns an empty string for a flag.
std::string value_word(const CLI::Option& option);

// Returns the description of `option`, such as "Ranks that share the state (1 to 16777216; default
// 1)". The description includes the range, the default, and other options that `option` needs or
// excludes.
std::string full_description(const CLI::Option& option);

class HelpFormat final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace sluice
