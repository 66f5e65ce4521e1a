// Options that name files. In the text of --help, "FILE" stands for a file that the command reads,
// and "OUTPUT" stands for a file that the command writes. A test checks every OUTPUT option.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

inline CLI::Option* add_input(CLI::App* command, const char* name, std::string& path,
                              const char* text) {
  return command->add_option(name, path, text)->type_name("FILE");
}

inline CLI::Option* add_output(CLI::App* command, const char* name, std::string& path,
                               const char* text) {
  return command->add_option(name, path, text)->type_name("OUTPUT");
}

}  // namespace sluice
