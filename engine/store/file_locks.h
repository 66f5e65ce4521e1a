// The locks on a store's data and record files. Each rank locks its own files, with flock() on the
// same open files that do its transfers. A transfer in the kernel holds its open file. So the lock
// ends when the last transfer has ended, even if the process was killed before: transfers of
// io_uring outlive their process. The lock in NAME.lock (store_lock.h) ends with the process.
//
// Thread rule: one thread at a time. The functions block.
// Invariant: a forked child holds no such lock, because it has no copy of the open files
// (base/process_fd.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <sys/types.h>

namespace sluice {

// Returns the process that has taken the flock() of an open file's inode, as the kernel tells it.
// The process may have ended. The result is empty if there is no lock, or if the kernel does not
// tell. The call does not take the lock, and so never hinders another process.
std::optional<pid_t> flock_holder(int descriptor);

// Returns whether `process` lives on this host, and has the file of `descriptor` open. In this
// process, `descriptor` itself does not count.
bool has_open(pid_t process, int descriptor);

// Describes the process that has locked the file, for messages. The result is empty if no such
// process is known on this host.
std::string file_user(const std::string& path);

// Locks files, one after the other, and waits for the last transfers of processes that have ended.
class FileLocks {
 public:
  // All calls of lock() together wait for at most `limit_s` seconds. 0 = ten minutes.
  explicit FileLocks(double limit_s);

  // Takes the lock of the open file `descriptor`. Closing the file gives the lock back.
  // Fails with:
  // - kInput: a living process has the lock. The message names the process. The call does not wait.
  // - kTimeout: the transfers of a process that has ended did not end in time.
  // - kIo and others: the file cannot be locked.
  void lock(int descriptor, const std::string& path);
  // Opens a file, waits as lock() does, and closes the file again. If there is no such file, or the
  // file cannot be opened, the call does nothing.
  void await(const std::string& path);

  // One line for the user that says how long lock() has waited, and for what. The line is empty if
  // there was nothing to wait for.
  std::string note() const;

 private:
  double limit_s_;
  std::chrono::steady_clock::duration waited_{};
  std::string awaited_;  // the first file that lock() has waited for
};

}  // namespace sluice
