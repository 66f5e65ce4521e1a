// Chooses a place in the data files of a new durable store for each copy of each plane. The
// functions are pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/store/commit_format.h"

namespace sluice {

struct CopyPlaces {
  // The list has one entry per plane, in the order of DurableHomes::planes. Each block has two
  // planes. The plane for the record of a frozen block has no bytes.
  std::vector<CommitPlane> planes;
  std::vector<std::uint64_t> file_bytes;  // by data file, one for each weight
};

// A block whose home is storage lies on the drive that plan_striping() chooses. The copies of other
// blocks are distributed over the drives according to `weights`. A plane that is never written
// again has one copy.
CopyPlaces place_copies(const Layout& layout, const Placement& placement,
                        std::span<const double> weights);

// The length in bytes of each copy of a plane.
std::uint64_t copy_bytes(const Layout& layout, std::uint32_t plane);

}  // namespace sluice
