#include "engine/checkpoint/checkpoint_kin.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include <sluice/error.h>
#include "engine/checkpoint/checkpoint_source.h"

namespace sluice {
namespace {

using Shapes = std::map<std::string, std::vector<std::uint64_t>>;

Shapes shapes_of(const StateDescription& state) {
  Shapes shapes;
  for (const StateDescription::Tensor& tensor : state.tensors) shapes[tensor.name] = tensor.shape;
  return shapes;
}

bool is_same_piece(const CheckpointManifest::Piece& one, const CheckpointManifest::Piece& other) {
  return one.first_element == other.first_element && one.element_count == other.element_count &&
         one.sum == other.sum;
}

bool is_same_tensor(const CheckpointManifest::Stored& one,
                    const CheckpointManifest::Stored& other) {
  return one.tensor == other.tensor && one.part == other.part && one.dtype == other.dtype &&
         std::ranges::equal(one.pieces, other.pieces, is_same_piece);
}

}  // namespace

CheckpointKin kin_of(const CheckpointManifest& fresh, const std::string& folder) {
  std::optional<CheckpointManifest> there;
  try {
    there = read_manifest(folder);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kDamaged ? CheckpointKin::kDamaged : CheckpointKin::kForeign;
  }
  if (shapes_of(there->state) != shapes_of(fresh.state)) return CheckpointKin::kForeign;
  const bool is_same = there->position.step == fresh.position.step &&
                       there->position.tensor_updates == fresh.position.tensor_updates &&
                       there->state.optimizer == fresh.state.optimizer &&
                       std::ranges::equal(there->stored, fresh.stored, is_same_tensor);
  return is_same ? CheckpointKin::kSameState : CheckpointKin::kSameModel;
}

}  // namespace sluice
