// Messages about a wrong command line. A message suggests the word that the user probably meant.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

// `error` is the exception that the parser threw for `app`. Returns a message that describes the
// user's mistake and says where to find help. If a command or an option is unknown, the message
// suggests the nearest known name. The function also describes an argument that no option accepts.
// For all other mistakes, the function returns the parser's own message.
std::string usage_mistake(const CLI::App& app, const CLI::ParseError& error);

// Returns the text that `sluice help WORDS` prints.
// Fails with kInvalidArgument if there is no such command.
std::string help_text(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace sluice
