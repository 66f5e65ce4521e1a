// The findings of several hosts are put together into one. Each host has storage paths of its own,
// so a kill during the creation can leave the hosts with different marks.
//
// Pure.
#pragma once

#include <span>
#include <string>

#include "engine/store/store_files.h"

namespace sluice {

struct HostFinding {
  std::string host;
  StoreFinding found;
};

// `findings` has one entry per rank. Returns the finding of all ranks together:
// - kMade if one host says so. Marks say "made" only after the records of all ranks have their
//   names, so a host that still says "creating" lacks no file.
// - kAbandoned if a host has useless files. The ids may differ, and each host removes its own.
// Fails with kInput if a host has a store of that name that another host lacks, or has two stores
// of that name between them. The message names the hosts.
StoreFinding finding_of_all(const std::string& name, std::span<const HostFinding> findings);

}  // namespace sluice
