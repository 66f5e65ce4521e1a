// Reads small text files as a whole: configs, calibrations, manifests. If the path names a folder,
// the file never ends, or the drive fails, the call returns the reason, and each caller can report
// it.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

// Returns the bytes of a file or a pipe. Returns nothing if the file cannot be read or has more
// than `bytes_max` bytes. In that case `why` is the reason, and `error` is the errno of the failed
// call.
std::optional<std::string> read_text_file(const std::string& path, std::uint64_t bytes_max,
                                          std::string& why, int* error = nullptr);

// Returns the first line of a file without the line's end, for example of a kernel file in /proc or
// /sys. The result is empty if there is no such file.
std::string first_line(const std::string& path);

}  // namespace sluice
