// The function protects the files of durable stores. No output of a command can then replace a file
// of a durable store.
//
// Thread rule: one thread.
#pragma once

#include <span>
#include <string>

#include "tools/cli/output_file.h"

namespace sluice {

// Finds the files of the store `name` in the folders `paths`, and adds the found files to the
// inputs of `files`. Does nothing if `name` is empty.
void add_store_inputs(OutputFiles& files, std::span<const std::string> paths,
                      const std::string& name);

}  // namespace sluice
