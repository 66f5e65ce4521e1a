#include "tools/commands/storage_drives.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr int kStackedMax = 8;  // a RAID on encrypted volumes on partitions is four

// A device-mapper or RAID device stands on its slaves; a partition's queue is its drive's.
void add_drives(const fs::path& device, int depth, std::vector<StorageDrive>& found) {
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  if (error || depth > kStackedMax) return;
  bool has_slaves = false;
  for (fs::directory_iterator slave(real / "slaves", error), end; !error && slave != end;
       slave.increment(error)) {
    has_slaves = true;
    add_drives(slave->path(), depth + 1, found);
  }
  if (has_slaves) return;
  const fs::path drive = fs::exists(real / "queue", error) ? real : real.parent_path();
  StorageDrive entry{.name = drive.filename(), .device = drive, .write_cache = ""};
  std::ifstream file(drive / "queue" / "write_cache");
  std::getline(file, entry.write_cache);
  const auto is_same = [&](const StorageDrive& other) { return other.name == entry.name; };
  if (std::ranges::none_of(found, is_same)) found.push_back(std::move(entry));
}

}  // namespace

std::vector<StorageDrive> storage_drives(const std::string& folder, const std::string& sysfs) {
  std::vector<StorageDrive> found;
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) return found;
  add_drives(fmt::format("{}/dev/block/{}:{}", sysfs, major(status.st_dev), minor(status.st_dev)),
             0, found);
  return found;
}

}  // namespace sluice
