// Makes commits durable beside the queue's other work. The writer goes through a commit's sequence
// (commit_sequence.h) stage by stage. The queue's completions drive the writer. The writer owns the
// buffer of the record that is written.
//
// Thread rule: one thread, which is the scheduler's in an engine. `post` brings completions to that
// thread.
// Invariants: at most one record is being written. The first failure ends the sequence: no later
// action is begun, and `ended` reports the failure once all actions under way have ended.
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

// An open file of a store; another object owns it.
struct StoreFile {
  int descriptor = -1;
  std::uint32_t drive = 0;
  std::string name;  // for messages
};

struct CommitFiles {
  std::vector<StoreFile> data;
  std::vector<StoreFile> twins;  // kCommitTwins record files
  std::uint64_t slot_bytes = 0;  // of each of a record file's slots
};

class CommitWriter {
 public:
  // `queue`, `files` and `watch` must outlive the writer. `watch` supervises the transfers and may
  // be null. Any thread may call `post`, which runs a function later on the writer's thread.
  CommitWriter(IoQueue& queue, const CommitFiles& files,
               std::function<void(std::function<void()>)> post, TransferWatch* watch = nullptr);
  // Requires: is_idle(), or a queue that will complete no more requests.
  ~CommitWriter();
  CommitWriter(const CommitWriter&) = delete;
  CommitWriter& operator=(const CommitWriter&) = delete;

  // The buffer for the next record. Requires: is_idle().
  std::span<std::byte> buffer() { return buffer_.span(); }
  bool is_idle() const { return sequence_.empty(); }
  // Begins no further stage. The sequence then ends when the actions under way have ended, and
  // `ended` is not called.
  void stop() { is_stopped_ = true; }

  // The time of the shortest flush of a record, in the last sequence or in the present one. Such a
  // flush finds little to write. 0 means that there was no flush.
  std::uint64_t flush_ns() const { return flush_ns_; }

  // Starts `sequence`, which writes `record_bytes` of the buffer to `slot`. Returns while the
  // sequence is under way. At the end, `ended` runs on the writer's thread, and the buffer is free.
  // If `ended` gets no error, everything is durable.
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
  std::vector<std::unique_ptr<Action>> actions_;  // of the stage; kept for the next
  std::size_t pending_ = 0;
  std::uint32_t slot_ = 0;
  std::uint64_t record_bytes_ = 0;
  std::uint64_t step_ = 0;
  std::uint64_t flush_ns_ = 0;
  bool is_stopped_ = false;
  std::optional<Error> failure_;
  std::function<void(std::optional<Error>)> ended_;
};

}  // namespace sluice
