// The manifest of a checkpoint, sluice_state.json (docs/checkpoints.md). The manifest describes
// what was trained and at which step. The manifest also has the lengths and checksums of all
// safetensors files in the folder. Each piece of a tensor has its own checksum. So a reader of a
// range reads only the pieces that overlap the range.
//
// Thread rule: the structs are plain data, and the functions are pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/state_source.h>
#include "io/checksum.h"

namespace sluice {

inline constexpr std::string_view kManifestName = "sluice_state.json";
// This text is the end of each message about a checkpoint that cannot be read.
inline constexpr std::string_view kCheckpointRemedy =
    "use another checkpoint (`sluice train --resume` takes the newest that is whole)";

// The kinds of state that a file can store for a tensor: compute parameters, masters or a moment.
// Masters are fp32. If the parameters are bf16, the files store only the low halves of the masters.
enum class CheckpointPart : std::uint8_t { kWeight, kMaster, kMasterLow, kExpAvg, kExpAvgSq };
std::string_view name_of(CheckpointPart part);

struct CheckpointManifest {
  struct File {
    std::string name;
    std::uint64_t size_bytes = 0;
    Checksum128 beginning;  // of the header's length and the header
    std::uint64_t beginning_bytes = 0;
    std::string sha256 = {};  // of the whole file; empty = not requested
  };
  struct Piece {
    std::uint64_t first_element = 0;
    std::uint64_t element_count = 0;
    Checksum128 sum;
  };
  struct Stored {
    std::string tensor;
    CheckpointPart part = CheckpointPart::kWeight;
    std::uint32_t file = 0;         // index in `files`
    std::string dtype;              // the type's name in safetensors
    std::uint64_t begin_bytes = 0;  // in the file
    std::vector<Piece> pieces;      // in order, without gaps
    std::string sha256 = {};        // of all pieces; empty = not requested
  };

  StatePosition position;
  StateDescription state;
  std::map<std::string, double> hyperparameters;  // only information for human readers
  std::vector<std::string> application;           // each rank's text
  std::vector<File> files;
  std::vector<Stored> stored;
};

// Fails with kInvalidArgument if the application's texts are not UTF-8.
std::string manifest_text(const CheckpointManifest& manifest);

// `path` is used only in messages.
// Fails with:
// - kDamaged: the text has changed since it was written.
// - kInput: the text is undamaged, but is not a manifest of this format. The message names the
//   field, the expected value and the found value.
CheckpointManifest parse_manifest(std::string_view text, const std::string& path);

}  // namespace sluice
