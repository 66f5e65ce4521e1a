// A new file under a unique name beside the file that it is to replace. The name goes with the
// object, and with a process that is ended by a signal which it handles. A process that is killed
// leaves the file. A file stays locked (flock) while its process has it open. So a later process
// can tell a leftover from a file that is being written, whatever the process numbers are: in
// containers these come again.
//
// Thread rule: one thread per object; remove_temporary_files() from any, and from signal handlers.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace sluice {

class TemporaryFile {
 public:
  TemporaryFile() = default;
  // `target`: absolute, without links; it need not exist. `mode` is as for open(2).
  // Fails with: std::system_error, with the errno of open(2).
  TemporaryFile(const std::string& target, mode_t mode);
  TemporaryFile(TemporaryFile&& other) noexcept;
  TemporaryFile& operator=(TemporaryFile&& other) noexcept;
  ~TemporaryFile();

  int descriptor() const { return descriptor_.get(); }
  const std::string& name() const { return name_; }  // empty once it has the target's name
  // Gives the file the target's name, in place of the file that has it. Returns 0 or an errno; then
  // the temporary name stays.
  int replace_target();
  // Leaves the file under its temporary name for good.
  void keep();

 private:
  void forget_name() noexcept;

  std::string target_;
  std::string name_;
  int slot_ = -1;  // in the table of names
  UniqueFd descriptor_;
};

// Temporary files for `target` that dead processes have left. It leaves out files that are being
// written, and those whose file system cannot tell.
std::vector<std::string> leftovers_of(const std::string& target);

// Removes the names of all temporary files of this process. Safe in a signal handler.
void remove_temporary_files() noexcept;

}  // namespace sluice
