// Protects the files of durable stores, so that no output of a command replaces them.
//
// Thread rule: one thread.
#pragma once

#include <span>
#include <string>

#include "tools/cli/output_file.h"

namespace sluice {

// Adds the files of store `name` in the folders `paths` to the inputs of `files`. Does nothing if
// `name` is empty.
void add_store_inputs(OutputFiles& files, std::span<const std::string> paths,
                      const std::string& name);

}  // namespace sluice
