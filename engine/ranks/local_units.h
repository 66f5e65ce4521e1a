// The check that the ranks' local units (UnitSpec::is_local) go together. In one place of the
// model, all ranks need units of the same shapes, so that homes and windows are equal on all ranks.
// The names have to be of one rank each, so that a name says whose state it is.
//
// Thread rule: the application's thread. All ranks call the function at the same point.
#pragma once

#include "engine/plan/layout.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// Fails with kRanks, on all ranks, if the ranks' local units do not go together. The message names
// the units.
void check_local_units(const Layout& layout, Ranks& ranks);

}  // namespace sluice
