#include "base/random_suffix.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include <fmt/format.h>

namespace sluice {

std::string random_suffix() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    throw std::system_error(errno, std::generic_category());
  return fmt::format("{:016x}", number);
}

}  // namespace sluice
