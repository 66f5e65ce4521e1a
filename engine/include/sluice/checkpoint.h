// A checkpoint holds the whole state of a training run. A checkpoint is a folder with safetensors
// files and a manifest. Training can continue from a checkpoint with other placements and budgets,
// with another number of ranks, or in another program (docs/checkpoints.md). Engine::save() writes
// a checkpoint, and open_checkpoint() returns the source for Engine::restore().
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

// The argument of the function SaveOptions::sha256. The argument names a file of a checkpoint, and
// ranges of this file. One range is the whole file, and each tensor in the file is another range,
// so the ranges overlap. When the function is called, the checkpoint is complete, but has no name
// yet.
struct FileRanges {
  struct Range {
    std::uint64_t begin_bytes = 0;
    std::uint64_t size_bytes = 0;
  };

  std::string path;
  std::vector<Range> ranges;
};

struct SaveOptions {
  // A UTF-8 text with the data that this rank needs to continue the training. An example is the
  // rank's position in the training data.
  std::string application = {};
  // The number of checkpoints that stay in the folder, including the new checkpoint; 0 = all. Older
  // checkpoints take space, but a run can continue from them if the new checkpoint is damaged.
  std::uint32_t keep = 0;
  // The largest size of a file. A file is larger only if it holds a single very large tensor.
  std::uint64_t file_bytes_max = 5'000'000'000;
  // Numbers that only inform human readers. The checkpoint also lists the numbers of the config.
  // The numbers of rank 0 are used.
  std::map<std::string, double> hyperparameters = {};
  // The texts of further files in the checkpoint's folder, by file name. The files of rank 0 are
  // used.
  std::map<std::string, std::string> files = {};
  // The function returns the SHA-256 of each range. Each SHA-256 consists of 64 hexadecimal digits.
  // The manifest lists these digests. The function is called only once per file, so it can compute
  // all digests in one pass over the file. If one rank sets this function, every rank has to set
  // the function. The function runs in the call that gives the checkpoint its name, perhaps on
  // another thread. In this call, the rank's share of the files is read again. After begin_save(),
  // the checkpoint gets its name in begin_step() or finish_save().
  std::function<std::vector<std::string>(const FileRanges& file)> sha256 = {};
};

struct SavedCheckpoint {
  std::string path;
  std::uint64_t step = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t duration_ns = 0;  // from the call until the checkpoint had its name
  // The time that this rank spent in the engine's calls for this checkpoint. This time is a part of
  // duration_ns.
  std::int64_t blocked_ns = 0;
  // The time during which updates waited until the checkpoint had copied the blocks of these
  // updates. Computation goes on during this wait, and stops only if computation needs an updated
  // block.
  std::int64_t update_wait_ns = 0;
  // For the user, on rank 0: leftovers that were removed, a link "latest" that could not be
  // replaced, an old checkpoint that could not be removed.
  std::vector<std::string> notes = {};
};

// The progress of a checkpoint that is written while training continues.
struct SaveProgress {
  std::uint64_t step = 0;
  std::uint64_t block_count = 0;  // of this rank
  std::uint64_t saved_blocks = 0;
};

enum class CheckpointPrecision : std::uint8_t {
  kAsSaved,
  // Masters are copied exactly. Parameters are made from the masters, by rounding to the type of
  // the engine's parameters. If a unit was frozen, the unit's moments start at zero.
  kConvert,
};

struct OpenCheckpoint {
  std::unique_ptr<StateSource> source;
  std::vector<std::string> application;  // one text for each rank that took part in the save
};

// Opens a saved checkpoint. `folder` is the folder of one checkpoint, such as "latest" below the
// root of all checkpoints. The function checks the manifest, and the length and the header of every
// file. The checksum of a range is checked later, when the range is read.
// Fails with kInput or kDamaged. The message names the file and the field, and gives both the
// expected value and the value that was found.
SLUICE_EXPORT OpenCheckpoint open_checkpoint(
    const std::string& folder, CheckpointPrecision precision = CheckpointPrecision::kAsSaved);

}  // namespace sluice
