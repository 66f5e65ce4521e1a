#include "base/memory_file.h"

#include <sys/mman.h>

#include <cerrno>

namespace sluice {

// Where vm.memfd_noexec demands it, a memory file has to declare that it is not executable; older
// kernels do not know the flag.
ProcessFd make_memory_file(const char* name) {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, from 6.3 on
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  return ProcessFd::opened_by([&] {
    const int file = ::memfd_create(name, kFlags | kNoExecSeal);
    return file >= 0 || errno != EINVAL ? file : ::memfd_create(name, kFlags);
  });
}

}  // namespace sluice
