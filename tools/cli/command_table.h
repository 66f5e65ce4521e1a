// The manual page and the completion for shells, from the same table of commands and options as
// --help. Pure.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// In roff with the macros of man(7): all commands with their options.
std::string man_page(const CLI::App& app);

// For bash: commands, their options, and otherwise file names.
std::string bash_completion(const CLI::App& app);

}  // namespace sluice
