// Checkpoints: all of a training's state in a folder of safetensors files with a manifest, for
// going on elsewhere: with other placements and budgets, at another number of ranks, or in other
// programs (docs/checkpoints.md). Engine::save() writes one; open_checkpoint() gives what
// Engine::restore() takes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/state_source.h>

namespace sluice {

struct SaveOptions {
  // What this rank needs to go on, as UTF-8: its position in the data, a random generator's state.
  std::string application = {};
  // How many checkpoints stay in the folder, this one included; 0 = all. More: more to fall back
  // to; fewer: less space.
  std::uint32_t keep = 0;
  // A file takes more only for one tensor that is larger.
  std::uint64_t file_bytes_max = 5'000'000'000;
  // Numbers for the reader, which nothing depends on; beside those of the config. Rank 0's.
  std::map<std::string, double> hyperparameters = {};
  // Further files of the folder, by name: rank 0's.
  std::map<std::string, std::string> files = {};
};

struct SavedCheckpoint {
  std::string path;
  std::uint64_t step = 0;
  std::uint64_t size_bytes = 0;
};

enum class CheckpointPrecision : std::uint8_t {
  kAsSaved,
  // Masters go over exactly, and parameters are rounded from them to the engine's type; a unit that
  // was frozen begins with moments of zero.
  kConvert,
};

struct OpenCheckpoint {
  std::unique_ptr<StateSource> source;
  std::vector<std::string> application;  // what each rank that saved it had to say
};

// A checkpoint that was saved: `folder` is its own, such as "latest" of where they are saved. Looks
// at the manifest, and at every file's length and header; every range that is read is compared with
// its checksum.
// Fails with: kInput and kDamaged, naming file, field, what was expected and what was found.
OpenCheckpoint open_checkpoint(const std::string& folder,
                               CheckpointPrecision precision = CheckpointPrecision::kAsSaved);

}  // namespace sluice
