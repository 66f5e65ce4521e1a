// The files of durable stores. No output of a command may replace these files.
//
// Thread rule: one thread.
#pragma once

#include <span>
#include <string>

#include "tools/cli/output_file.h"

namespace sluice {

// Adds all files of store `name` that lie in `paths` to the inputs. Does nothing for an empty name.
void add_store_inputs(OutputFiles& files, std::span<const std::string> paths,
                      const std::string& name);

}  // namespace sluice
