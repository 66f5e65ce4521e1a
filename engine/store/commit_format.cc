#include "engine/store/commit_format.h"

#include "io/checksum.h"

namespace sluice {

std::uint64_t commit_checksum(CommitHeader header, std::span<const std::byte> rest) {
  header.checksum = 0;
  const std::uint64_t parts[] = {checksum(std::as_bytes(std::span(&header, 1))), checksum(rest)};
  return checksum(std::as_bytes(std::span(parts)));
}

}  // namespace sluice
