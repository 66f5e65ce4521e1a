// Makes the manual page, and the completion for shells. Both outputs come from the same table of
// commands and options as --help. Pure.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// All commands with their options, in roff with the macros of man(7).
std::string man_page(const CLI::App& app);

// Scripts with which a shell completes commands, their options, and otherwise file names. The
// completions for zsh and fish also show a description of each word.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace sluice
