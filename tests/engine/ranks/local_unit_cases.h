// In these cases, some experts are local units of one rank (UnitSpec::is_local). The model with all
// units is the model of routed_options(). If experts have equal shapes, these experts are spread
// over the ranks. The experts that are not local units belong to every rank. The functions are
// pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "tests/engine/step/announce_cases.h"

namespace sluice::test {

// Returns the only rank that has `unit`, or nothing if `unit` is not local. `unit` is an id in the
// model with all units. With 2 or 3 ranks, all ranks have the same number of local units.
inline std::optional<std::uint32_t> owner_of(UnitId unit, std::uint32_t ranks) {
  const std::uint32_t expert = index_of(unit) - kFirstExpert;  // huge for other units
  if (expert >= 18 || expert % 3 != 0) return std::nullopt;
  return expert / 3 % ranks;
}

// The model of one rank. The rank's local units come after all other units.
struct RankModel {
  ModelSpec model;
  std::vector<UnitId> whole;               // by unit: the unit's id in the model with all units
  std::vector<std::optional<UnitId>> own;  // by unit of the model with all units
};

inline RankModel model_of_rank(const ToyOptions& options, std::uint32_t rank, std::uint32_t ranks) {
  const ModelSpec whole = toy_model_of(options);
  RankModel result{.model = whole, .whole = {}, .own = {}};
  result.model.units.clear();
  result.own.resize(whole.units.size());
  for (const bool are_local : {false, true}) {
    for (std::uint32_t i = 0; i < whole.units.size(); ++i) {
      const std::optional<std::uint32_t> owner = owner_of(UnitId{i}, ranks);
      if (owner.has_value() != are_local || owner.value_or(rank) != rank) continue;
      result.own[i] = UnitId{static_cast<std::uint32_t>(result.model.units.size())};
      result.whole.push_back(UnitId{i});
      result.model.units.push_back(whole.units[i]);
      result.model.units.back().is_local = are_local;
    }
  }
  return result;
}

// Returns the uses that one rank makes. The argument `uses` lists the uses of the model with all
// units. If several uses of experts follow each other, the rank's local experts come first or last.
// The choice is random.
inline ToyUses uses_of_rank(const RankModel& model, std::uint32_t rank, std::uint32_t ranks,
                            std::uint64_t seed, const ToyUses& uses) {
  std::mt19937_64 random(seed * 31 + rank);
  ToyUses own;
  for (auto begin = uses.begin(); begin != uses.end();) {
    const auto is_expert = [](const ToyUse& use) { return index_of(use.unit) >= kFirstExpert; };
    const auto end = is_expert(*begin) ? std::find_if_not(begin, uses.end(), is_expert) : begin + 1;
    const bool local_first = random() % 2 == 0;
    for (const bool are_local : {local_first, !local_first}) {
      for (auto use = begin; use != end; ++use) {
        const std::optional<std::uint32_t> owner = owner_of(use->unit, ranks);
        if (owner.has_value() != are_local || owner.value_or(rank) != rank) continue;
        own.push_back(*use);
        own.back().unit = *model.own[index_of(use->unit)];
      }
    }
    begin = end;
  }
  return own;
}

}  // namespace sluice::test
