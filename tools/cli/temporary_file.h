// A new file under a unique name, beside the file to be replaced. The name is removed with the
// object, and also when a signal that the process handles ends the process. A process that is
// killed leaves the file. A file stays locked (flock) while its process keeps the file open. So a
// later process can tell a leftover from a file that is being written. Process numbers could not
// tell, because in containers the numbers repeat.
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
  // `target` is an absolute path without links. The file need not exist. `mode` is as for open(2).
  // Fails with std::system_error, with the errno of open(2).
  TemporaryFile(const std::string& target, mode_t mode);
  TemporaryFile(TemporaryFile&& other) noexcept;
  TemporaryFile& operator=(TemporaryFile&& other) noexcept;
  ~TemporaryFile();

  int descriptor() const { return descriptor_.get(); }
  const std::string& name() const { return name_; }  // empty once the file has the target's name
  // Renames the file to the target's name. This replaces the target. Returns 0 or an errno. After
  // an error, the temporary name stays.
  int replace_target();
  // Leaves the file under its temporary name permanently.
  void keep();

 private:
  void forget_name() noexcept;

  std::string target_;
  std::string name_;
  int slot_ = -1;  // in the table of names
  UniqueFd descriptor_;
};

// The temporary files for `target` that dead processes have left. The list leaves out files that
// are being written, and files on a file system without locks.
std::vector<std::string> leftovers_of(const std::string& target);

// Removes the names of all temporary files of this process. The call is safe in a signal handler.
void remove_temporary_files() noexcept;

}  // namespace sluice
