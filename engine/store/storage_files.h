// The engine's demands on the files of the storage paths.
//
// Thread rule: the functions are pure.
#pragma once

#include <span>
#include <string>

#include "io/direct_file.h"

namespace sluice {

// Fails with kUnsupported if the file system of a file asks for a larger alignment than the blocks
// have.
void check_alignment(std::span<const DirectFile> files);

// Returns a line for the user that names the files whose file systems have refused O_DIRECT. If
// there is no such file, the result is empty.
std::string note_of_cached(std::span<const DirectFile> files);

}  // namespace sluice
