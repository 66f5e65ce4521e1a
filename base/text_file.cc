#include "base/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/unique_fd.h"

namespace sluice {
namespace {

constexpr std::uint64_t kReadBytes = 64_KiB;

}  // namespace

std::optional<std::string> read_text_file(const std::string& path, std::uint64_t bytes_max,
                                          std::string& why, int* error) {
  const auto fail = [&](int number) {
    why = number == EISDIR ? "it is a folder; name a file in it" : errno_text(number);
    if (error != nullptr) *error = number;
    return std::nullopt;
  };
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return fail(errno);
  std::string text;
  while (text.size() <= bytes_max) {
    const std::size_t end = text.size();
    text.resize(end + kReadBytes);
    const ssize_t got = ::read(file.get(), text.data() + end, kReadBytes);
    if (got < 0 && errno != EINTR) return fail(errno);
    text.resize(end + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return text;
  }
  why = fmt::format("it has more than {}", format_bytes(bytes_max));
  return std::nullopt;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace sluice
