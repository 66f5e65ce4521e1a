// `sluice version`: what this program is and was built with.
#pragma once

#include <string>

namespace sluice {

// The one line of `sluice --version`.
std::string version_line();

int run_version(bool as_json);

}  // namespace sluice
