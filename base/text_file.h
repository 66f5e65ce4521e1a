// Reads small text files as a whole: configs, calibrations, manifests. The call returns a reason if
// the path names a folder, if the file never ends, or if the drive fails. So each caller can report
// the reason.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

// Returns the bytes of a file or a pipe. Returns nothing if the file cannot be read or has more
// than `bytes_max` bytes. If the call returns nothing, `why` is the reason, and `error` is the
// errno of the failed call. If the file is too large, `error` stays as it is.
std::optional<std::string> read_text_file(const std::string& path, std::uint64_t bytes_max,
                                          std::string& why, int* error = nullptr);

// Returns the first line of a file without the end-of-line character. The function is meant for
// kernel files in /proc and /sys. The result is empty if the file does not exist.
std::string first_line(const std::string& path);

}  // namespace sluice
