#include "base/memory_file.h"

#include <sys/mman.h>

#include <cerrno>

namespace sluice {

// Where vm.memfd_noexec demands it, a memory file has to declare that it is not executable; older
// kernels do not know the flag.
UniqueFd make_memory_file(const char* name) {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, from 6.3 on
  const int file = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (file >= 0 || errno != EINVAL) return UniqueFd(file);
  return UniqueFd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

}  // namespace sluice
