#include "engine/store/storage_files.h"

#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/layout.h"

namespace sluice {

void check_alignment(std::span<const DirectFile> files) {
  for (const DirectFile& file : files)
    if (!is_aligned(kStorageAlignBytes, file.alignment_bytes()))
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}: its file system asks for an alignment of {}, more than the 4 KiB "
                      "that Sluice lays blocks out for; use another path",
                      file.name(), format_bytes(file.alignment_bytes())));
}

std::string note_of_cached(std::span<const DirectFile> files) {
  std::vector<std::string> names;
  for (const DirectFile& file : files)
    if (!file.is_direct()) names.push_back(file.name());
  if (names.empty()) return {};
  return fmt::format(
      "storage: {} {} through the page cache, because the file system refuses O_DIRECT: this is "
      "slow, and displaces other memory; name folders on ext4 or XFS on local drives in "
      "storage.paths",
      fmt::join(names, ", "), names.size() == 1 ? "goes" : "go");
}

}  // namespace sluice
