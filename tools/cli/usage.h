// Messages about a wrong command line, with the words that were probably meant.
//
// Thread rule: at start-up.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

// One message: an unknown command or option with the nearest known one, arguments that nothing
// takes, or else what the parser says; and where help is. `error` is what parsing `app` has thrown.
std::string usage_mistake(const CLI::App& app, const CLI::ParseError& error);

// `sluice help WORDS`. Fails with: kInvalidArgument, where there is no such command.
std::string help_text(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace sluice
