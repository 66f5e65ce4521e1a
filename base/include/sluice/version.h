// The version of the library. CMakeLists.txt reads the version from this file.
//
// Until version 1.0, a new minor version may change public headers, config keys and file formats.
// CHANGELOG.md lists these changes. A new patch version changes no public header, config key or
// file format. Headers outside include/sluice/ are not public and may change at any time.
#pragma once

#include <string_view>

// The version as a number for the preprocessor: 10000 * major + 100 * minor + patch.
#define SLUICE_VERSION 100

namespace sluice {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace sluice
