// The functions write the manual page and the completion scripts for shells. The functions take the
// texts of commands and options from the parser's table. The text of --help comes from the same
// table. The functions are pure.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// The manual page of all commands and their options, in roff with the macros of man(7).
std::string man_page(const CLI::App& app);

// The script for one shell. With the script, the shell completes commands, their options, and file
// names. The scripts for zsh and fish also show a description of each word.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace sluice
