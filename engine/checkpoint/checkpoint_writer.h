// Writes a checkpoint. Rank 0 makes the folder and its files, and every rank writes the ranges that
// it owns, on several threads. When all ranks have written, rank 0 adds the manifest and gives the
// checkpoint its name. Synchronous.
//
// Thread rule: the application's thread, while no step is active; all ranks take part.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_plan.h"
#include "engine/plan/layout.h"
#include "engine/ranks/ranks.h"
#include "engine/store/state_access.h"

namespace sluice {

// Values of the config for the readers of a checkpoint; nothing depends on these values.
std::map<std::string, double> hyperparameters_of(const Config::Optimizer& optimizer);

class CheckpointWriter {
 public:
  // The blocks that this rank owns, for example with StateAccess::visit_blocks(). Several threads
  // may call the visitor, with different places. Fails with: its own errors; those of the visitor.
  struct Blocks {
    std::function<void(const StateAccess::Visit& visit)> visit;
    std::uint32_t place_count = 1;
  };

  // The references must outlive the writer.
  CheckpointWriter(const Layout& layout, const StateDescription& description, Blocks blocks,
                   Ranks& ranks);

  // `application`: the texts of ranks that are not running, which replace the options' text.
  // Fails with: kNoSpace, kIo, kInput, kInvalidArgument, on all ranks; a rank reports its own
  // failure or that another rank has failed. The contents of `root` are then as before.
  SavedCheckpoint save(const std::string& root, const StatePosition& position,
                       const SaveOptions& options, std::vector<std::string> application = {});

 private:
  // A piece that this rank has written; sent to rank 0 as bytes.
  struct Written {
    std::uint64_t stored = 0;  // its number in the plan
    CheckpointManifest::Piece piece;
  };
  std::string begin(const CheckpointPlan& plan, std::optional<NewCheckpoint>& fresh,
                    const std::string& root);
  std::vector<Written> write_own(const CheckpointPlan& plan, const std::string& folder);
  std::vector<Written> write_block(const CheckpointPlan& plan, const BlockView& view,
                                   std::vector<CheckpointFile>& files, AlignedBuffer& room) const;
  CheckpointManifest manifest_of(const CheckpointPlan& plan, const StatePosition& position,
                                 const SaveOptions& options, std::vector<Written> written,
                                 std::vector<std::string> application) const;

  const Layout& layout_;
  const StateDescription& description_;
  Blocks blocks_;
  Ranks& ranks_;
};

}  // namespace sluice
