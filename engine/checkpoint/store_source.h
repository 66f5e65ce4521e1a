// A source that reads the state from a durable store. The source reads the files of all ranks in
// place. So training can continue with another number of ranks, another stage or another block
// size. The state can also be saved as a portable checkpoint. This host must have access to the
// files of all ranks. As long as the source exists, no other job can use the store.
//
// Thread rule: several threads may call read() at the same time; one thread makes all other calls.
// Invariant: the source writes only the text of the lock files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.h>
#include "base/aligned_buffer.h"
#include "engine/plan/layout.h"
#include "engine/store/block_values.h"
#include "engine/store/commit_record.h"
#include "engine/store/durable_identity.h"
#include "engine/store/store_files.h"
#include "engine/store/store_lock.h"
#include "io/io_queue.h"

namespace sluice {

class StoreSource final : public StateSource {
 public:
  // Opens the newest commit that all ranks have. `job` is a random text that identifies a job.
  // After one process of the job has opened the store, all other processes of the job may open the
  // store, too. If `job` is empty, no other process can open the store.
  // Fails with:
  // - kInput: the store does not exist, another job is using it, or files of a rank are missing.
  // - kDamaged: the record of the store is damaged.
  // - kUnsupported: the record has no list of units, because the list did not fit into the record.
  StoreSource(const std::string& name, const std::vector<std::string>& directories,
              CheckpointPrecision precision = CheckpointPrecision::kAsSaved,
              const std::string& job = "");
  ~StoreSource() override;

  const DescribedRun& run() const { return run_; }
  const StateDescription& description() const { return description_; }
  // The list has one text of the application for each rank.
  const std::vector<std::string>& application() const { return application_; }

  StatePosition position() const override { return position_; }
  // Fails with kInput if the store's model, precision or optimizer differs from `wanted`.
  void prepare(const StateDescription& wanted) override;
  // Fails with:
  // - kDamaged: bytes have changed since they were written. The message names the file and the
  //   range.
  // - kIo: the drive reports an error.
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override;
  bool allows_threads() const override { return true; }

 private:
  // A block in memory. While a thread reads from a slot, no other thread uses the slot.
  struct Slot {
    std::unique_ptr<IoQueue> queue;
    AlignedBuffer buffer;  // the block's planes
    std::size_t part = 0;
    BlockView view = {};
    bool is_loaded = false;
    bool is_taken = false;
    std::uint64_t use = 0;  // the number of the last use
  };

  // One rank's part.
  struct Part {
    Layout layout;
    StoreFiles files;
    std::vector<CommitPlane> planes;  // two per block; empty for a plane without bytes
  };

  void open_parts(const std::vector<std::uint32_t>& ranks);
  void add_part(std::uint32_t rank, StoreFiles files, const CommitRecord& record);
  const TensorPlace& find(const std::string& tensor) const;
  Slot& take_slot(std::size_t part, const BlockPlace& block);
  void give_back(Slot& slot);
  void load(Slot& slot, std::size_t part, const BlockPlace& block) const;
  void read_plane_of(const Slot& slot, std::size_t part, std::uint32_t plane,
                     std::byte* target) const;

  // Constant after construction.
  StoreFiles::Options options_;
  CheckpointPrecision precision_;
  std::vector<StoreLock> locks_;
  DescribedRun run_;
  StateDescription description_;
  std::vector<std::string> application_;
  StatePosition position_;
  std::vector<Part> parts_;          // of the ranks that together have the whole state
  std::uint64_t record_offset_ = 0;  // in a slot's buffer
  std::uint64_t slot_bytes_ = 0;

  // mutex_ guards the next members, but not the content of a slot that is taken.
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> slots_;  // at most twice the number used at one time
  std::uint64_t uses_ = 0;
};

}  // namespace sluice
