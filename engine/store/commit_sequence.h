// The order in which a commit becomes durable, as a list of stages. All actions of a stage are
// submitted together. A stage begins when the previous stage has ended. CommitWriter follows the
// sequence (commit_writer.h). Tests also try wrong sequences.
//
//   The stages are: data files flushed | first twin written | flushed | second twin written |
//   flushed
//
// A record is written only after the data that it names is durable. A record's two copies, the
// twins, are written one after the other, so that a power cut leaves at least one twin whole. If a
// flush fails, no later stage begins.
//
// Thread rule: the functions are pure.
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

// The sequence that writes the record of a state.
CommitSequence commit_sequence(std::uint32_t data_file_count);
// These two functions return the sequences for a void record and for the repair of a twin. No new
// data is written, so no data is flushed. Both sequences flush the two twins first. A killed
// process may have left twins that can be read but are not durable yet. Without the first flush, a
// power cut could leave both twins torn. If one twin does not hold the slot's record, `first_twin`
// must be this twin. The void sequence writes the twin `first_twin` first, and the other twin last.
CommitSequence void_sequence(std::uint32_t first_twin);
CommitSequence mend_sequence(std::uint32_t twin);

}  // namespace sluice
