// A CommitOpening finds the commit from which a store continues, and repairs the records. A commit
// is made void if other ranks have no commit of the same step. A twin is one of the two copies of a
// record. If a power cut or a drive has damaged a twin, the twin is written again. The repair may
// be interrupted at any point, and can then be repeated.
//
// Thread rule: one thread calls the functions, before other code uses the files. Every function
// that reads or writes files waits for storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/commit_choice.h"
#include "engine/store/commit_writer.h"
#include "io/io_queue.h"

namespace sluice {

// Writes `record` to `slot`, in the stages of `sequence`. When the call returns, the record is
// durable.
// Fails with kIo if the drive reports an error.
void write_commit(IoQueue& queue, const CommitFiles& files, CommitSequence sequence,
                  std::uint32_t slot, const CommitRecord& record);

class CommitOpening {
 public:
  // Reads the records, and changes no file. The two arguments must outlive the object. Fails in the
  // same cases as choose_commit().
  CommitOpening(IoQueue& queue, const CommitFiles& files);

  const CommitChoice& choice() const { return choice_; }
  // The newest commit. The result is nullptr if there has never been a commit.
  const CommitRecord* newest() const;
  CommitOffer offer() const;
  // The commit of `step`.
  // Requires: offer() contains `step`.
  const CommitRecord& of_step(std::uint64_t step) const;

  // Makes the commit of `step` the newest commit. If there is a newer commit, the call makes the
  // newer commit void. When the call returns, the change is durable.
  // Requires: offer() contains `step`.
  // Fails with kIo if the drive reports an error.
  void go_back(std::uint64_t step);
  // Rewrites the twins that do not hold their slot's record. For each damaged twin, the call
  // returns one line of text for the user.
  // Fails with kIo if the drive reports an error.
  std::vector<std::string> mend();

 private:
  IoQueue& queue_;
  const CommitFiles& files_;
  FoundCommits found_;
  CommitChoice choice_;
};

}  // namespace sluice
