// Finds the commit that a store continues from, and repairs the records. If a rank has a commit of
// a later step than all ranks have, this commit is made void. Twins that a power cut or a drive has
// damaged are written again. The repair may be interrupted at any point and repeated.
//
// Thread rule: one thread, before anything else uses the files. Every function waits for storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/commit_choice.h"
#include "engine/store/commit_writer.h"
#include "io/io_queue.h"

namespace sluice {

// Writes a record to `slot` by following `sequence`. The record is durable on return.
// Fails with kIo if the drive reports an error.
void write_commit(IoQueue& queue, const CommitFiles& files, CommitSequence sequence,
                  std::uint32_t slot, const CommitRecord& record);

class CommitOpening {
 public:
  // Reads the records and changes nothing. The two arguments must outlive the object.
  // Fails with the errors of choose_commit().
  CommitOpening(IoQueue& queue, const CommitFiles& files);

  const CommitChoice& choice() const { return choice_; }
  // The newest commit. The result is nullptr if there has never been a commit.
  const CommitRecord* newest() const;
  CommitOffer offer() const;
  // The commit of a step. Requires: offer() has `step`.
  const CommitRecord& of_step(std::uint64_t step) const;

  // Makes the newest commit void unless it is the commit of `step`. Afterwards, the newest commit
  // is the commit of `step`. Durable on return.
  // Requires: offer() has `step`.
  // Fails with kIo if the drive reports an error.
  void go_back(std::uint64_t step);
  // Rewrites the twins that do not hold their slot's record. Returns a line for the user about each
  // damaged twin.
  // Fails with kIo if the drive reports an error.
  std::vector<std::string> mend();

 private:
  IoQueue& queue_;
  const CommitFiles& files_;
  FoundCommits found_;
  CommitChoice choice_;
};

}  // namespace sluice
