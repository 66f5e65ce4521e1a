// The order in which a commit becomes durable, as data: stages of actions that go to storage
// together; each stage begins when all of the one before has ended. The writer of a record follows
// it (commit_writer.h), and tests try wrong ones.
//
//   data files flushed | first twin written | flushed | second twin written | flushed
//
// The data comes before any record that names it. The twins come one after the other, so that a
// power cut leaves one of them whole; if a flush fails, nothing after it is begun.
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

// For the record of a state.
CommitSequence commit_sequence(std::uint32_t data_file_count);
// For a void record, and for a twin that is repaired: they name no new data. The twins' content is
// flushed first. Otherwise a killed process may have left content there that reads see and a power
// cut would take, and both twins would be torn. `first_twin`: one that does not hold the slot's
// record, if there is one, so that the whole one goes last.
CommitSequence void_sequence(std::uint32_t first_twin);
CommitSequence mend_sequence(std::uint32_t twin);

}  // namespace sluice
