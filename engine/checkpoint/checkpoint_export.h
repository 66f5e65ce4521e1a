// Writes what a source has as a portable checkpoint, without an engine.
//
// Thread rule: one thread.
#pragma once

#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/model_spec.h>

namespace sluice {

// Of `config`, precision, optimizer and block size count. `application`: what each rank had to say.
// `root`: as Engine::save(). Fails with: likewise, and what the source fails with.
SavedCheckpoint export_checkpoint(StateSource& source, const ModelSpec& model, const Config& config,
                                  const std::string& root, const SaveOptions& options,
                                  const std::vector<std::string>& application);

}  // namespace sluice
