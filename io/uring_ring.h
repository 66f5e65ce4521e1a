// An io_uring instance. The class wraps the part of liburing that uring_queue uses. The class also
// reports the features that the kernel or a container refuses.
//
// Thread rule: any thread may make a ring. After begin(), only the thread that called begin() uses
// the ring.
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
  // A system call that the kernel has refused. If `error` is 0, there was no refusal.
  struct Refusal {
    const char* call = "";
    int error = 0;
  };
  struct Completion {
    std::uint64_t tag = 0;
    int result = 0;  // bytes, or -errno
  };

  // Makes room for `entries` submissions, and for at least the same number of completions. Fails
  // with kUnsupported if the kernel refuses the ring. If the kernel refuses only to register memory
  // or files, the constructor succeeds, and note() tells the reason.
  UringRing(unsigned entries, const IoQueueOptions& options);
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;
  ~UringRing();

  // Makes the calling thread the owner of the ring, and sends one test entry through the ring. A
  // container may allow io_uring_setup but refuse later calls. Returns the refusal. The result has
  // error 0 if there was no refusal.
  Refusal begin();
  // Throws `refusal` as an Error. The Error has the code kUnsupported.
  [[noreturn]] static void throw_refused(const Refusal& refusal);

  // Adds an entry for submit_and_wait(). Requires: there is room for the entry.
  void prepare(IoKind kind, int descriptor, const TransferAttempt& attempt, std::uint64_t tag);
  // Submits the prepared entries and sleeps until there is a completion. The call may also return
  // without a completion. Returns 0, or the errno of the kernel's refusal. After a refusal, the
  // ring is unusable.
  int submit_and_wait();
  // Appends the available completions to `target`.
  void reap(std::vector<Completion>& target);

  // The next two functions are for an unusable ring. take_back() appends completions with `result`
  // for all entries that the kernel has never taken. look() checks for completions of the entries
  // that the kernel has taken. look() returns false if the kernel does not allow this check.
  void take_back(std::vector<Completion>& target, int result);
  bool look();

  // The owner calls these functions just before its thread ends. Without them, the kernel gives
  // files and memory free some time after the ring has ended. Memory must have no request in
  // flight, because the call would wait for the request.
  void release_files();
  void release_memory();

  const std::string& note() const { return note_; }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::string note_;
};

}  // namespace sluice
