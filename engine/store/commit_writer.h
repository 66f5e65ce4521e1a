// The writer makes commits durable while the queue does other work. The writer follows a commit's
// sequence (commit_sequence.h), stage by stage. A stage begins when the queue has completed all
// actions of the previous stage. The writer owns the buffer that holds the record.
//
// Thread rule: one thread, called the writer's thread. In an engine, this is the scheduler's
// thread. `post` passes completions to the writer's thread.
// Invariants: at most one record is being written. The first failure ends the sequence. After this
// failure, no action begins. The writer passes the failure to `ended` when no action is under way
// any more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "engine/store/commit_sequence.h"
#include "io/io_queue.h"

namespace sluice {

class TransferWatch;

// An open file of a store. Another object owns the descriptor.
struct StoreFile {
  int descriptor = -1;
  std::uint32_t drive = 0;
  std::string name;  // for messages
};

struct CommitFiles {
  std::vector<StoreFile> data;
  std::vector<StoreFile> twins;  // kCommitTwins record files
  std::uint64_t slot_bytes = 0;  // length of each slot of a record file
};

class CommitWriter {
 public:
  // `queue`, `files` and `watch` must outlive the writer. `watch` supervises the transfers, and may
  // be null. `post` receives a function, and must run this function on the writer's thread. The
  // writer may call `post` on any thread.
  CommitWriter(IoQueue& queue, const CommitFiles& files,
               std::function<void(std::function<void()>)> post, TransferWatch* watch = nullptr);
  // Requires: is_idle() is true, or the queue completes no more requests.
  ~CommitWriter();
  CommitWriter(const CommitWriter&) = delete;
  CommitWriter& operator=(const CommitWriter&) = delete;

  // The buffer that the caller fills with the next record.
  // Requires: is_idle().
  std::span<std::byte> buffer() { return buffer_.span(); }
  bool is_idle() const { return sequence_.empty(); }
  // No further stage begins after this call. The sequence ends when the actions under way have
  // ended. `ended` is not called.
  void stop() { is_stopped_ = true; }

  // The duration of the shortest flush of a record file. The result is for the present sequence. If
  // no sequence is under way, the result is for the last sequence. A flush of a record file has
  // little to write. If there was no flush, the result is 0.
  std::uint64_t flush_ns() const { return flush_ns_; }

  // Returns whether the present sequence, or the last one, has begun to write a record. From then
  // on, an opening may find that record, whatever happens to the sequence.
  bool has_begun_record() const { return has_begun_record_; }

  // Starts `sequence`, which writes the first `record_bytes` of the buffer to `slot`. The call
  // returns at once, while the sequence is under way. When the sequence has ended, the buffer is
  // free, and `ended` runs on the writer's thread. If `ended` gets no error, the commit is durable.
  // Requires: is_idle(), and record_bytes is a multiple of kCommitAlignBytes.
  void begin(CommitSequence sequence, std::uint32_t slot, std::uint64_t record_bytes,
             std::uint64_t step, std::function<void(std::optional<Error>)> ended);

 private:
  struct Action;

  std::string describe(const CommitAction& action) const;
  void begin_stage();
  void action_ended(Action& action);
  const StoreFile& file_of(const CommitAction& action) const;
  Error error_of(const Action& action) const;

  IoQueue& queue_;
  const CommitFiles& files_;
  std::function<void(std::function<void()>)> post_;
  TransferWatch* watch_;
  AlignedBuffer buffer_;

  CommitSequence sequence_;  // empty: idle
  std::size_t stage_ = 0;
  std::vector<std::unique_ptr<Action>> actions_;  // of the present stage; kept for the next stage
  std::size_t pending_ = 0;
  std::uint32_t slot_ = 0;
  std::uint64_t record_bytes_ = 0;
  std::uint64_t step_ = 0;
  std::uint64_t flush_ns_ = 0;
  bool has_begun_record_ = false;
  bool is_stopped_ = false;
  std::optional<Error> failure_;
  std::function<void(std::optional<Error>)> ended_;
};

}  // namespace sluice
