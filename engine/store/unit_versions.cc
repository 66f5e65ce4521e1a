#include "engine/store/unit_versions.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

void UnitVersions::restore(const StatePosition& position) {
  const auto updates_of = [&](const TensorPlace& tensor) {
    const auto found = position.tensor_updates.find(tensor.name);
    if (found == position.tensor_updates.end()) return position.step;
    if (found->second <= position.step) return found->second;
    throw Error(ErrorCode::kInput,
                fmt::format("the state of step {} says that tensor \"{}\" has seen {} updates",
                            position.step, tensor.name, found->second));
  };
  std::vector<std::uint64_t> versions(layout_.units().size(), 0);
  for (const UnitPlace& unit : layout_.units()) {
    if (unit.is_frozen) continue;
    const auto tensors = layout_.tensors_of(unit.id);
    // A tensor that was frozen until now joins those that it is updated with.
    const auto has_any = [&](const TensorPlace& tensor) { return updates_of(tensor) != 0; };
    const auto first = std::ranges::find_if(tensors, has_any);
    const std::uint64_t updates = first == tensors.end() ? 0 : updates_of(*first);
    for (const TensorPlace& tensor : tensors) {
      if (!has_any(tensor) || updates_of(tensor) == updates) continue;
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\" has seen {} updates and \"{}\" {}, but both are in unit "
                              "\"{}\", whose tensors are updated together; keep them in units of "
                              "their own, as in the run that has saved the state",
                              first->name, updates, tensor.name, updates_of(tensor), unit.name));
    }
    versions[index_of(unit.id)] = updates;
  }
  versions_ = std::move(versions);
}

std::map<std::string, std::uint64_t> UnitVersions::tensor_updates(std::uint64_t step) const {
  std::map<std::string, std::uint64_t> updates;
  for (const TensorPlace& tensor : layout_.tensors()) {
    if (!layout_.unit(tensor.unit).is_frozen && of(tensor.unit) != step)
      updates[tensor.name] = of(tensor.unit);
  }
  return updates;
}

}  // namespace sluice
