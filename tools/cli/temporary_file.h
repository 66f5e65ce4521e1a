// A new file with a unique temporary name. The new file lies in the same folder as the target. The
// target is the file that the new file will replace. The destructor removes the temporary name. If
// a signal ends the process, the signal handler removes the temporary name. If the process is
// killed and the handler does not run, the file stays. The process holds a lock on the file (flock)
// as long as the file is open. The lock lets a later process distinguish a leftover file from a
// file that is being written. A process number could not replace the lock, because two processes in
// different containers can have the same number.
//
// Thread rule: one thread per object. Any thread and any signal handler may call
// remove_temporary_files().
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace sluice {

class TemporaryFile {
 public:
  TemporaryFile() = default;
  // `target` is an absolute path without links. The target need not exist. `mode` has the same
  // meaning as in open(2).
  // Fails with std::system_error if the file cannot be made. The error has the errno of open(2).
  TemporaryFile(const std::string& target, mode_t mode);
  TemporaryFile(TemporaryFile&& other) noexcept;
  TemporaryFile& operator=(TemporaryFile&& other) noexcept;
  ~TemporaryFile();

  int descriptor() const { return descriptor_.get(); }
  const std::string& name() const { return name_; }  // empty once the file has the target's name
  // Renames the file to the target's name. The file then replaces the target. Returns 0 or an
  // errno. After an error, the file keeps its temporary name.
  int replace_target();
  // Lets the file keep its temporary name permanently, so that the destructor does not remove the
  // name.
  void keep();

 private:
  void forget_name() noexcept;

  std::string target_;
  std::string name_;
  int slot_ = -1;  // index in the table of names
  UniqueFd descriptor_;
};

// Returns the temporary files for `target` that processes have left. These processes have ended.
// The list does not contain files that are being written. On a file system without locks, the list
// is empty.
std::vector<std::string> leftovers_of(const std::string& target);

// Returns whether another process still writes `path`, a file that had a temporary name before. On
// a file system without locks, the result is false.
bool is_being_written(const std::string& path);

// Removes the names of all temporary files of this process. A signal handler may call this
// function.
void remove_temporary_files() noexcept;

}  // namespace sluice
