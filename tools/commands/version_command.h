// `sluice version` prints the version of this program and a description of its build.
#pragma once

#include <string>

namespace sluice {

// Returns the single line that `sluice --version` prints.
std::string version_line();

int run_version(bool as_json);

}  // namespace sluice
