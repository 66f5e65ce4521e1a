// The ranks' local units (UnitSpec::is_local). Ranks check that these units go together: in one
// place of the model, all ranks need units of the same shapes, so that homes and windows are equal
// on all ranks. The names have to be of one rank each, so that a name says whose state it is, also
// in a checkpoint of all ranks.
//
// Thread rule: the application's thread. All ranks call the functions at the same points.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <sluice/state_source.h>
#include "engine/plan/layout.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// Fails with kRanks, on all ranks, if the ranks' local units do not go together. The message names
// the units.
void check_local_units(const Layout& layout, Ranks& ranks);

// The state of all ranks: the tensors that the ranks share, and then each rank's local ones, rank
// by rank. Equal on all ranks. `own` is this rank's. Without local units, no rank needs to call it.
StateDescription describe_all_ranks(const StateDescription& own, const Layout& layout,
                                    Ranks& ranks);
// The same for StatePosition::tensor_updates.
std::map<std::string, std::uint64_t> updates_of_all_ranks(
    const std::map<std::string, std::uint64_t>& own, Ranks& ranks);

}  // namespace sluice
