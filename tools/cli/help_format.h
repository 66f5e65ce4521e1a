// The texts of --help: options with the values they take, wrapped to the terminal's width. The
// parser's own texts show names of types and ranges as the code has them.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// Returns the word that stands for the value of `option`, such as "N", "SIZE" or "full|half".
// Returns an empty string for a flag.
std::string value_word(const CLI::Option& option);

// Returns the description of `option` with its range, its default and the options that it needs or
// excludes: "Ranks that share the state (1 to 16777216; default 1)".
std::string full_description(const CLI::Option& option);

class HelpFormat final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace sluice
