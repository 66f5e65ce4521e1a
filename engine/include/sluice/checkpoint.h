// Checkpoints: all of a training's state in a folder of safetensors files with a manifest, to
// continue elsewhere: with other placements and budgets, at another number of ranks, or in other
// programs (docs/checkpoints.md). Engine::save() writes one; open_checkpoint() returns the source
// for Engine::restore().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/state_source.h>

namespace sluice {

struct SaveOptions {
  // This rank's own data to continue with, as UTF-8: its position in the data, random state.
  std::string application = {};
  // How many checkpoints stay in the folder, including this one; 0 = all. More leave more to fall
  // back to; fewer take less space.
  std::uint32_t keep = 0;
  // A file exceeds this only for a single tensor that is larger.
  std::uint64_t file_bytes_max = 5'000'000'000;
  // Numbers for the reader, beside those of the config; nothing depends on them. Rank 0's are used.
  std::map<std::string, double> hyperparameters = {};
  // Further files of the folder, by name. Rank 0's are used.
  std::map<std::string, std::string> files = {};
};

struct SavedCheckpoint {
  std::string path;
  std::uint64_t step = 0;
  std::uint64_t size_bytes = 0;
};

enum class CheckpointPrecision : std::uint8_t {
  kAsSaved,
  // Masters are copied exactly, and parameters are rounded from them to the engine's type; a unit
  // that was frozen starts with zero moments.
  kConvert,
};

struct OpenCheckpoint {
  std::unique_ptr<StateSource> source;
  std::vector<std::string> application;  // from each rank that saved the checkpoint
};

// Opens a saved checkpoint. `folder` is the checkpoint's own, such as "latest" below the root of
// all. Checks the manifest, and every file's length and header; each range is compared with its
// checksum when it is read.
// Fails with: kInput and kDamaged, naming file, field, the expected and the found value.
OpenCheckpoint open_checkpoint(const std::string& folder,
                               CheckpointPrecision precision = CheckpointPrecision::kAsSaved);

}  // namespace sluice
