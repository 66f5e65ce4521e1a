// A ring of io_uring as a value: what of liburing the queue uses, and the answers of a kernel, or
// of a container around it, that refuses some of it.
//
// Thread rule: made by any thread; used by the one that calls begin(), its owner, until its end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/io_queue.h"
#include "io/transfer_progress.h"

namespace sluice {

class UringRing {
 public:
  // A system call that the kernel has refused; error 0: none.
  struct Refusal {
    const char* call = "";
    int error = 0;
  };
  struct Completion {
    std::uint64_t tag = 0;
    int result = 0;  // bytes, or -errno
  };

  // Room for `entries` submissions, and for at least as many completions.
  // Fails with: kUnsupported. Where only memory or files cannot be registered, note() says why.
  UringRing(unsigned entries, const IoQueueOptions& options);
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;
  ~UringRing();

  // The calling thread becomes the owner, and goes through the ring once: a container may let
  // io_uring_setup pass and refuse the calls behind it. Returns what it has met.
  Refusal begin();
  // Says so. Fails with: kUnsupported.
  [[noreturn]] static void throw_refused(const Refusal& refusal);

  // Adds an entry for submit_and_wait(). Requires: room for it.
  void prepare(IoKind kind, int descriptor, const TransferAttempt& attempt, std::uint64_t tag);
  // Submits what is prepared and sleeps until there is a completion. May return early.
  // Returns 0, or the errno with which the kernel has refused: the ring is of no more use then.
  int submit_and_wait();
  // Appends the completions that are there to `target`.
  void reap(std::vector<Completion>& target);

  // Of a ring that is of no more use: what the kernel has not taken and never will, as completions
  // with `result`; then looks for completions of what it has. Returns whether the kernel lets it.
  void take_back(std::vector<Completion>& target, int result);
  bool look();

  // At the owner's end.
  void release_files();

  const std::string& note() const { return note_; }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::string note_;
};

}  // namespace sluice
