// Makes a durable store from any source of a state, for a number of ranks that do not run yet:
// the same files and the same first commit as engines of these ranks would make.
//
// Thread rule: one thread.
// Invariant: until all of it is durable the store does not exist: the next opening or making of a
// store of that name removes the remains of a kill.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state_source.h>

namespace sluice {

struct NewStore {
  std::uint64_t step = 0;
  std::uint64_t size_bytes = 0;  // of all its files
};

// Makes the store that `config` names, on its paths, for `ranks` ranks. `application`: the first
// ranks' texts; further ranks get the first one's.
// Fails with: kInput where there is one of that name already, or the source's state does not fit;
// kConfig, kNoSpace, kIo, and the source's own errors. Only lock files are left behind.
NewStore make_store(const Config& config, const ModelSpec& model, std::uint32_t ranks,
                    StateSource& source, std::span<const std::string> application);

}  // namespace sluice
