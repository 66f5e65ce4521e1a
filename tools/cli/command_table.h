// Makes the manual page and the completion for shells, from the same table of commands and options
// as --help. Pure.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// All commands with their options, in roff with the macros of man(7).
std::string man_page(const CLI::App& app);

// A script for bash that completes commands, their options, and otherwise file names.
std::string bash_completion(const CLI::App& app);

}  // namespace sluice
