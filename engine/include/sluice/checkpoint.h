// A checkpoint holds the whole state of a training in a folder of safetensors files with a
// manifest. Training can continue from a checkpoint with other placements and budgets, at another
// number of ranks, or in another program (docs/checkpoints.md). Engine::save() writes a checkpoint,
// and open_checkpoint() returns the source for Engine::restore().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/export.h>
#include <sluice/state_source.h>

namespace sluice {

// The argument of SaveOptions::sha256: a file of a checkpoint, and ranges of the file. One range is
// the whole file, and each of its tensors is another range, so ranges overlap. At the time of the
// call, the checkpoint is complete, but has no name yet.
struct FileRanges {
  struct Range {
    std::uint64_t begin_bytes = 0;
    std::uint64_t size_bytes = 0;
  };

  std::string path;
  std::vector<Range> ranges;
};

struct SaveOptions {
  // The data that this rank needs to continue, as UTF-8, such as its position in the training data.
  std::string application = {};
  // The number of checkpoints that stay in the folder, including the new one; 0 = all. Older
  // checkpoints take space, but a run can fall back to them.
  std::uint32_t keep = 0;
  // The largest size of a file. Only a file that holds one very large tensor is larger.
  std::uint64_t file_bytes_max = 5'000'000'000;
  // Numbers for human readers, in addition to the config's numbers; nothing depends on them. The
  // numbers of rank 0 are used.
  std::map<std::string, double> hyperparameters = {};
  // Further files of the folder, by name. The files of rank 0 are used.
  std::map<std::string, std::string> files = {};
  // Computes the SHA-256 of each range, as 64 hexadecimal digits, for the manifest. The engine
  // passes each file only once, so the function can compute all ranges in one reading. Every rank
  // has to set this function. The call that gives the checkpoint its name first reads the rank's
  // share of the files again, perhaps on another thread. After begin_save(), that call is
  // begin_step() or finish_save().
  std::function<std::vector<std::string>(const FileRanges& file)> sha256 = {};
};

struct SavedCheckpoint {
  std::string path;
  std::uint64_t step = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t duration_ns = 0;  // from the call until the checkpoint had its name
  // The part of duration_ns that this rank spent in the engine's calls for this checkpoint.
  std::int64_t blocked_ns = 0;
  // How long updates waited because the checkpoint had not yet copied their blocks. During this
  // wait, computation goes on until it needs an updated block.
  std::int64_t update_wait_ns = 0;
};

// A checkpoint that is being written beside training.
struct SaveProgress {
  std::uint64_t step = 0;
  std::uint64_t block_count = 0;  // of this rank
  std::uint64_t saved_blocks = 0;
};

enum class CheckpointPrecision : std::uint8_t {
  kAsSaved,
  // Masters are copied exactly, and parameters are the masters rounded to the engine's type. A unit
  // that was frozen starts with zero moments.
  kConvert,
};

struct OpenCheckpoint {
  std::unique_ptr<StateSource> source;
  std::vector<std::string> application;  // from each rank that saved the checkpoint
};

// Opens a saved checkpoint. `folder` is the folder of one checkpoint, such as "latest" below the
// root of all checkpoints. The function checks the manifest, and the length and the header of every
// file. A range is compared with its checksum later, when the range is read.
// Fails with kInput or kDamaged. The message names the file, the field, and the expected and the
// found value.
SLUICE_EXPORT OpenCheckpoint open_checkpoint(
    const std::string& folder, CheckpointPrecision precision = CheckpointPrecision::kAsSaved);

}  // namespace sluice
