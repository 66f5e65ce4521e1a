// Messages about a wrong command line, with the words that were probably meant.
//
// Thread rule: at start-up.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

// Returns a message that describes one mistake and says where to find help. The mistake is an
// unknown command or option, or an argument that no option takes. An unknown name comes with the
// nearest known name. For any other mistake, the message is the parser's own. `error` is the
// exception from parsing `app`.
std::string usage_mistake(const CLI::App& app, const CLI::ParseError& error);

// The text of `sluice help WORDS`.
// Fails with kInvalidArgument if there is no such command.
std::string help_text(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace sluice
