// Finds the commit that a store continues from, and repairs its records: a rank's commit beyond the
// step that all ranks have is made void, and twins that a power cut or a drive has damaged are
// written again. All of this may be interrupted anywhere and repeated.
//
// Thread rule: one thread, before anything else uses the files; every function waits for storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/commit_choice.h"
#include "engine/store/commit_writer.h"
#include "io/io_queue.h"

namespace sluice {

// Goes through `sequence` with a record for `slot`. Durable on return. Fails with: kIo.
void write_commit(IoQueue& queue, const CommitFiles& files, CommitSequence sequence,
                  std::uint32_t slot, const CommitRecord& record);

class CommitOpening {
 public:
  // Reads the records and changes nothing. Both must outlive it.
  // Fails with: as choose_commit().
  CommitOpening(IoQueue& queue, const CommitFiles& files);

  const CommitChoice& choice() const { return choice_; }
  // The newest commit; nullptr: there has never been one.
  const CommitRecord* newest() const;
  CommitOffer offer() const;
  // The commit of a step. Requires: offer() has it.
  const CommitRecord& of_step(std::uint64_t step) const;

  // Makes the newest commit void unless it is that of `step`; then the older one is. Durable on
  // return.
  // Requires: offer() has `step`. Fails with: kIo.
  void go_back(std::uint64_t step);
  // Writes again the twins that do not hold their slot's record. Returns a line for the user about
  // each damaged twin. Fails with: kIo.
  std::vector<std::string> mend();

 private:
  IoQueue& queue_;
  const CommitFiles& files_;
  FoundCommits found_;
  CommitChoice choice_;
};

}  // namespace sluice
