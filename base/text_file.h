// The functions read small files of text as a whole: configs, calibrations, manifests. If the path
// is a folder, the file never ends, or the drive fails, the call returns the reason, so that each
// caller can report it.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

// Returns the bytes of the file, or of the pipe. Returns nothing if the file cannot be read or has
// more than `bytes_max` bytes. Then `why` gives the reason, and `error` gives the errno of the call
// that has failed.
std::optional<std::string> read_text_file(const std::string& path, std::uint64_t bytes_max,
                                          std::string& why, int* error = nullptr);

// Returns the first line of a file, such as the kernel's in /proc and /sys, without its end. The
// result is empty if there is no such file.
std::string first_line(const std::string& path);

}  // namespace sluice
