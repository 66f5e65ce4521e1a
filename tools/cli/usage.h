// Messages about a wrong command line, with the words that were probably meant.
//
// Thread rule: at start-up.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

// Returns a message about one mistake and where to find help. The mistake is an unknown command or
// option (with the nearest known name), an argument that no option takes, or else the parser's own
// message. `error` is the exception from parsing `app`.
std::string usage_mistake(const CLI::App& app, const CLI::ParseError& error);

// The text of `sluice help WORDS`. Fails with: kInvalidArgument if there is no such command.
std::string help_text(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace sluice
