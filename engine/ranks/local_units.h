// The ranks' local units (UnitSpec::is_local). The ranks check that their local units match. At
// each position of the model, all ranks need units of the same shapes, so that homes and windows
// are equal on all ranks. Two ranks must not have local units with the same name. So the name
// identifies the rank, even in a checkpoint of all ranks.
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

// Fails with kRanks on all ranks if the ranks' local units do not match. The message names the
// units.
void check_local_units(const Layout& layout, Ranks& ranks);

// Returns the description of the state of all ranks. The description lists the tensors that the
// ranks share, and then the local tensors of each rank, in the order of the ranks. The result is
// equal on all ranks. `own` is the description of this rank's state. If there are no local units,
// no rank needs to call the function.
StateDescription describe_all_ranks(const StateDescription& own, const Layout& layout,
                                    Ranks& ranks);
// Combines StatePosition::tensor_updates of all ranks. The result is equal on all ranks.
std::map<std::string, std::uint64_t> updates_of_all_ranks(
    const std::map<std::string, std::uint64_t>& own, Ranks& ranks);

}  // namespace sluice
