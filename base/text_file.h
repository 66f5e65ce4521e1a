// Reads small files of text as a whole: configs, calibrations, manifests. A folder, a file that
// never ends and a failing drive are results of the call, so that each reader can name them.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

// Returns the bytes of the file, or of the pipe. Returns nothing if the file cannot be read or has
// more than `bytes_max` bytes; `why` then says so.
std::optional<std::string> read_text_file(const std::string& path, std::uint64_t bytes_max,
                                          std::string& why);

}  // namespace sluice
