// How a checkpoint in a folder relates to a new checkpoint in the same folder. A new checkpoint
// only takes the place of checkpoints whose loss costs nothing.
//
// Thread rule: the functions are pure, apart from reading files.
#pragma once

#include <cstdint>
#include <string>

#include "engine/checkpoint/checkpoint_manifest.h"

namespace sluice {

enum class CheckpointKin : std::uint8_t {
  // The checkpoint has the same bits of state at the same step. The new checkpoint replaces such a
  // checkpoint.
  kSameState,
  // The checkpoint is of a model with the same tensors. The number of checkpoints to keep counts
  // such checkpoints.
  kSameModel,
  // The checkpoint is of another model or of another program, and stays.
  kForeign,
  // The manifest is damaged, so nothing says which model the checkpoint is of. The checkpoint
  // stays, and does not count: otherwise, it could take the place of one that is whole.
  kDamaged,
};

// Compares the checkpoint in `folder` with the manifest of a new checkpoint. Pieces of tensors are
// compared by their checksums, so no state is read. If another block size has divided the tensors
// into other pieces, the states count as different.
CheckpointKin kin_of(const CheckpointManifest& fresh, const std::string& folder);

}  // namespace sluice
