// A ring of io_uring as a value: the part of liburing that the queue uses, and the answers of a
// kernel, or of a container around it, that refuses some of it.
//
// Thread rule: any thread makes it; from begin() on, only the thread that called that uses it.
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

  // Makes the calling thread the owner and tries the ring once: a container may let io_uring_setup
  // pass and refuse the later calls. Returns the refusal, if any.
  Refusal begin();
  // Throws `refusal`. Fails with: kUnsupported.
  [[noreturn]] static void throw_refused(const Refusal& refusal);

  // Adds an entry for submit_and_wait(). Requires: room for it.
  void prepare(IoKind kind, int descriptor, const TransferAttempt& attempt, std::uint64_t tag);
  // Submits the prepared entries and sleeps until there is a completion. May return early. Returns
  // 0, or the errno of the kernel's refusal: the ring is unusable then.
  int submit_and_wait();
  // Appends the available completions to `target`.
  void reap(std::vector<Completion>& target);

  // For an unusable ring: take_back() returns entries that the kernel never took, as completions
  // with `result`. look() checks for completions of the others; returns whether the kernel lets it.
  void take_back(std::vector<Completion>& target, int result);
  bool look();

  // The owner calls this before it ends.
  void release_files();

  const std::string& note() const { return note_; }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::string note_;
};

}  // namespace sluice
