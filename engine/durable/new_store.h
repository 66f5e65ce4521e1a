// Makes a durable store from the state of any source. The store is for ranks that are not running
// yet. The store has the same files and the same first commit as a store that the ranks' engines
// make.
//
// Thread rule: one thread.
// Invariant: the store does not exist until all of its data is durable. If the process is killed
// before all data is durable, some files may remain. These files are removed the next time that a
// store of this name is opened or made.
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

// The function makes the store that `config` names, on the paths that `config` names. `ranks` is
// the store's number of ranks. `application` has one text of the application for each of the first
// ranks. If `application` has no text for a rank, the rank gets the first text.
// Fails with:
// - kInput: a store of this name exists already, or the source's state does not fit.
// - kConfig, kNoSpace or kIo: the files cannot be made.
// - The source's own errors.
// After a failure, only lock files are left behind. Files that cannot be removed are removed the
// next time that a store of this name is opened or made.
NewStore make_store(const Config& config, const ModelSpec& model, std::uint32_t ranks,
                    StateSource& source, std::span<const std::string> application);

}  // namespace sluice
