// Finds the commit that a store goes on from, and makes its records fit for going on: what a rank
// has beyond the step that all have is made void, and twins that a power cut or a drive has damaged
// are written again. All of it may be cut short anywhere and done again.
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

class CommitOpening {
 public:
  // Reads the records, changes nothing. Both must outlive it.
  // Fails with: as choose_commit().
  CommitOpening(IoQueue& queue, const CommitFiles& files);

  const CommitChoice& choice() const { return choice_; }
  // The newest commit; nullptr: none has ever been made.
  const CommitRecord* newest() const;
  CommitOffer offer() const;

  // Makes the newest commit void where that is not the one of `step`: the older one is. Durable on
  // return.
  // Requires: offer() has `step`. Fails with: kIo.
  void go_back(std::uint64_t step);
  // Writes again the twins that do not hold their slot's record. Returns a line for the user on
  // each that was damaged. Fails with: kIo.
  std::vector<std::string> mend();

 private:
  void write(CommitSequence sequence, std::uint32_t slot, const CommitRecord& record);

  IoQueue& queue_;
  const CommitFiles& files_;
  FoundCommits found_;
  CommitChoice choice_;
};

}  // namespace sluice
