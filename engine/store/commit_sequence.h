// The order in which a commit becomes durable, as a list of stages. The actions of a stage go to
// storage together, and a stage begins when the previous stage has ended. The writer of a record
// follows the sequence (commit_writer.h), and tests try wrong sequences.
//
//   The stages are: data files flushed | first twin written | flushed | second twin written |
//   flushed
//
// The data comes before any record that names the data. The two copies of a record are written one
// after the other, so that a power cut leaves one copy whole. If a flush fails, no later stage is
// begun.
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

// The sequence for the record of a state.
CommitSequence commit_sequence(std::uint32_t data_file_count);
// This sequence is for a void record or for the repair of a twin. Such a record or twin names no
// new data. The content of both twins is flushed first. A process that was killed may have left
// content that reads see, but that a power cut would still remove. Without this flush, both twins
// would then be torn. If a twin does not hold the slot's record, `first_twin` is that twin. So the
// whole twin is written last.
CommitSequence void_sequence(std::uint32_t first_twin);
CommitSequence mend_sequence(std::uint32_t twin);

}  // namespace sluice
