// Writes a checkpoint. Rank 0 makes the folder and its files. Every rank uses several threads to
// write the blocks that the rank owns. After all ranks have written, rank 0 adds the manifest and
// gives the checkpoint its name.
//
// Thread rule: the comments of write() and sync() state the rules of these functions. All other
// functions run on the application's thread, and all ranks call them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_plan.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"
#include "engine/store/state_access.h"

namespace sluice {

// Returns some values of the config. A checkpoint contains these values only for human readers.
std::map<std::string, double> hyperparameters_of(const Config::Optimizer& optimizer);

class CheckpointWriter {
 public:
  // `layout` and `ranks` must outlive the writer. `description` describes the state of all ranks,
  // including the local units of each rank. `thread_count` is the number of threads that call
  // write().
  CheckpointWriter(const Layout& layout, StateDescription description, std::uint32_t thread_count,
                   Ranks& ranks);

  // Makes the folder and its files.
  // Fails with kNoSpace, kIo, kInput or kInvalidArgument, on all ranks. Each rank reports its own
  // failure or the failure of another rank. After a failure, the contents of `root` are as before.
  void begin(const std::string& root, const StatePosition& position, const SaveOptions& options);
  // Returns whether this rank writes blocks. If several ranks have the same blocks, only the first
  // of these ranks writes the blocks. Each rank writes its own local units.
  bool writes_blocks() const { return writes_shared_blocks() || has_local_; }
  // Writes a block that this rank has. If another rank writes the same block, the call does
  // nothing. Several threads may call this function. Each thread has its own number, `thread`, and
  // its own memory, `room`. The size of `room` is room_bytes().
  // Fails with the errors of CheckpointFile. The message names the file.
  void write(const BlockView& view, std::uint32_t thread, std::span<std::byte> room);
  std::uint64_t room_bytes() const { return room_.size_bytes(); }
  // Any thread may call this function after the last write(). When the call returns, all data that
  // this rank has written is on the drive.
  // Fails with kIo if the drive reports an error. The message names the file.
  void sync();
  // Gives the checkpoint its name. If this rank has not written its part, `failure` says why. A
  // checkpoint may be for ranks that are not running. `application` then contains one application
  // text for each rank. These texts replace SaveOptions::application.
  // Fails in the same cases as begin(). If there is a `failure`, the call throws the failure.
  SavedCheckpoint finish(const std::optional<Error>& failure,
                         std::vector<std::string> application = {});

  // Calls `visit` with every block that this rank owns.
  using VisitBlocks = std::function<void(const StateAccess::Visit& visit)>;
  // Writes a whole checkpoint in one call. `visit_blocks` gives the blocks that this rank owns, for
  // example with StateAccess::visit_blocks().
  // Fails with the errors of begin() and of `visit_blocks`.
  SavedCheckpoint save(const std::string& root, const StatePosition& position,
                       const SaveOptions& options, const VisitBlocks& visit_blocks,
                       std::vector<std::string> application = {});

 private:
  // A piece that this rank has written. The rank sends this object to rank 0 as bytes.
  struct Written {
    std::uint64_t stored = 0;  // index in CheckpointPlan::tensors
    CheckpointManifest::Piece piece;
  };
  // The files that a thread wrote last. The files stay open, because the next block usually goes to
  // the same files.
  struct OpenFiles {
    struct Open {
      std::uint32_t index = 0;  // in the plan
      CheckpointFile file;
    };
    std::vector<Open> files;  // the file that was used last is at the end
  };
  bool writes_shared_blocks() const { return ranks_.rank() < ranks_.owner_count(); }
  CheckpointFile& open(OpenFiles& files, std::uint32_t index) const;
  std::vector<Written> write_block(const BlockView& view, OpenFiles& files,
                                   std::span<std::byte> room) const;
  // Adds the digests of all files and tensors, if SaveOptions::sha256 asks for digests. All ranks
  // take part.
  void add_sha256(CheckpointManifest& manifest) const;
  std::string own_sha256(const CheckpointManifest& manifest) const;
  CheckpointManifest manifest_of(std::vector<Written> written,
                                 std::vector<std::string> application) const;

  const Layout& layout_;
  const StateDescription description_;
  const bool has_local_;  // this rank has local units, and there are several ranks
  const SaveRoom room_;
  Ranks& ranks_;

  // From begin() on:
  SaveOptions options_;
  StatePosition position_;
  CheckpointPlan plan_;
  std::vector<std::uint32_t> described_;  // by tensor of the layout: the number in the description
  std::optional<NewCheckpoint> fresh_;    // only on rank 0
  std::string folder_;
  std::vector<OpenFiles> open_files_;  // by thread
  std::mutex mutex_;                   // guards the next member
  std::vector<Written> written_;
};

}  // namespace sluice
