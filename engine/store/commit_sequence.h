// The order in which a commit becomes durable, as data: stages of actions that go to storage
// together, each stage when all of the one before has ended. Whoever writes a record goes through
// it (commit_writer.h), and tests go through wrong ones.
//
//   data files flushed | first twin written | flushed | second twin written | flushed
//
// The data comes before any record that names it. The twins come one after the other, so that a
// power cut leaves one of them whole; on flushes that fail, nothing behind them is begun.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

enum class CommitActionKind : std::uint8_t { kFlushData, kWriteTwin, kFlushTwin };

struct CommitAction {
  CommitActionKind kind = CommitActionKind::kFlushData;
  std::uint32_t index = 0;  // of the data file, or the twin
  bool operator==(const CommitAction&) const = default;
};
using CommitStage = std::vector<CommitAction>;
using CommitSequence = std::vector<CommitStage>;

// For a record of a state.
CommitSequence commit_sequence(std::uint32_t data_file_count);
// For a void record, and for a twin that is mended: no data is named anew. Whatever is in the twins
// is flushed before: a process that was killed may have left there what reads see and a power cut
// would take, so that both would be torn. `first_twin`: one that does not hold the slot's record,
// where there is such a one, so that the whole one goes last.
CommitSequence void_sequence(std::uint32_t first_twin);
CommitSequence mend_sequence(std::uint32_t twin);

}  // namespace sluice
