#include "tests/support/accessible.h"

#include <unistd.h>

#include <array>
#include <cerrno>

#include <sluice/error.h>
#include "base/unique_fd.h"

namespace sluice::test {
namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    SLUICE_CHECK(::pipe(ends.data()) == 0, "a pipe");
    out = UniqueFd(ends[0]);
    in = UniqueFd(ends[1]);
  }
  UniqueFd out, in;
};

bool done(ssize_t transferred) {
  SLUICE_CHECK(transferred == 1 || errno == EFAULT, "a pipe takes and gives one byte");
  return transferred == 1;
}

}  // namespace

bool is_readable(const std::byte* address) {
  const Pipe pipe;
  return done(::write(pipe.in.get(), address, 1));
}

bool is_writable(std::byte* address) {
  const Pipe pipe;
  if (!done(::write(pipe.in.get(), address, 1))) return false;
  return done(::read(pipe.out.get(), address, 1));
}

}  // namespace sluice::test
