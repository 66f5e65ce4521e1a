#include "engine/store/commit_sequence.h"

#include "engine/store/commit_format.h"

namespace sluice {
namespace {

void add_twin(CommitSequence& sequence, std::uint32_t twin) {
  sequence.push_back({{CommitActionKind::kWriteTwin, twin}});
  sequence.push_back({{CommitActionKind::kFlushTwin, twin}});
}

CommitStage all_files(CommitActionKind kind, std::uint32_t count) {
  CommitStage stage;
  for (std::uint32_t file = 0; file < count; ++file) stage.push_back({kind, file});
  return stage;
}

}  // namespace

CommitSequence commit_sequence(std::uint32_t data_file_count) {
  CommitSequence sequence;
  if (data_file_count != 0)
    sequence.push_back(all_files(CommitActionKind::kFlushData, data_file_count));
  for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) add_twin(sequence, twin);
  return sequence;
}

CommitSequence void_sequence(std::uint32_t first_twin) {
  CommitSequence sequence{all_files(CommitActionKind::kFlushTwin, kCommitTwins)};
  for (std::uint32_t i = 0; i < kCommitTwins; ++i)
    add_twin(sequence, (first_twin + i) % kCommitTwins);
  return sequence;
}

CommitSequence mend_sequence(std::uint32_t twin) {
  CommitSequence sequence{all_files(CommitActionKind::kFlushTwin, kCommitTwins)};
  add_twin(sequence, twin);
  return sequence;
}

}  // namespace sluice
