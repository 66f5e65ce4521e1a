// Writes the state of a source as a portable checkpoint. No engine is needed.
//
// Thread rule: one thread.
#pragma once

#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/model_spec.h>

namespace sluice {

// The function takes precision, optimizer and block size from `config`. `application` has one text
// of the application for each rank. If a text is not UTF-8, the checkpoint has U+FFFD in place of
// the other bytes, and SavedCheckpoint::notes says so. `root` has the same meaning as in
// Engine::save().
// Fails with the errors of Engine::save(), and with the source's own errors.
SavedCheckpoint export_checkpoint(StateSource& source, const ModelSpec& model, const Config& config,
                                  const std::string& root, const SaveOptions& options,
                                  const std::vector<std::string>& application);

}  // namespace sluice
