// The version of the library. CMakeLists.txt reads it from this file.
//
// Until version 1.0, a new minor version may change public headers, config keys and file formats;
// CHANGELOG.md lists such changes. A new patch version changes none of these. Headers outside
// include/sluice/ are not public and may change at any time.
#pragma once

#include <string_view>

// The version as a number for the preprocessor: 10000 * major + 100 * minor + patch.
#define SLUICE_VERSION 100

namespace sluice {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace sluice
