#include "tools/cli/file_place.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr int kLinksMax = 40;  // as the kernel

// Empty and errno where there is no such folder.
std::string without_links(const std::string& folder) {
  char* const resolved = ::realpath(folder.empty() ? "." : folder.c_str(), nullptr);
  if (resolved == nullptr) return {};
  std::string text = resolved;
  std::free(resolved);
  return text;
}

FileKind kind_of(mode_t mode) {
  if (S_ISREG(mode)) return FileKind::kRegular;
  if (S_ISDIR(mode)) return FileKind::kFolder;
  return S_ISBLK(mode) ? FileKind::kBlockDevice : FileKind::kOther;
}

void fill_in(FilePlace& place, const struct stat& status) {
  place.kind = kind_of(status.st_mode);
  place.mode = status.st_mode & 07777;
  place.owner = status.st_uid;
  place.group = status.st_gid;
  place.device = status.st_dev;
  place.inode = status.st_ino;
}

bool is_mount_point(const std::string& file) {
  struct statx status {};
  return ::statx(AT_FDCWD, file.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE, &status) == 0 &&
         (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

bool is_number(std::string_view text) {
  return !text.empty() && text.size() < 9 &&
         std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

std::string link_text(const std::string& link) {
  char text[PATH_MAX] = {};
  const ssize_t length = ::readlink(link.c_str(), text, sizeof(text));
  return length < 0 ? std::string() : std::string(text, static_cast<std::size_t>(length));
}

}  // namespace

FilePlace place_of(const std::string& path) {
  FilePlace place;
  place.path = place.target = path;
  for (int links = 0; links <= kLinksMax; ++links) {
    const std::size_t slash = place.target.rfind('/');
    const std::string name =
        slash == std::string::npos ? place.target : place.target.substr(slash + 1);
    // "folder/", "." and ".." are folders, if anything.
    const bool is_folder = name.empty() || name == "." || name == "..";
    place.folder = without_links(is_folder ? place.target : place.target.substr(0, slash + 1));
    place.error = place.folder.empty() ? errno : 0;
    if (place.error != 0) return place;
    if (is_folder) {
      place.kind = FileKind::kFolder;
      return place;
    }
    struct stat status {};
    if (place.folder == fmt::format("/proc/{}/fd", ::getpid()) && is_number(name)) {
      place.descriptor = std::stoi(name);
      if (::fstat(*place.descriptor, &status) == 0) {
        fill_in(place, status);
      } else {
        place.error = errno;
      }
      return place;
    }
    place.target = place.folder == "/" ? "/" + name : place.folder + "/" + name;
    if (::lstat(place.target.c_str(), &status) != 0) {
      place.error = errno == ENOENT ? 0 : errno;
      return place;
    }
    if (!S_ISLNK(status.st_mode)) {
      fill_in(place, status);
      place.is_mount = place.kind == FileKind::kRegular && is_mount_point(place.target);
      return place;
    }
    const std::string next = link_text(place.target);
    place.target = next.starts_with("/") ? next : place.folder + "/" + next;
  }
  place.error = ELOOP;
  return place;
}

bool is_same_file(const FilePlace& a, const FilePlace& b) {
  if (a.error != 0 || b.error != 0 || a.kind != b.kind) return false;
  if (a.kind == FileKind::kMissing) return a.target == b.target;
  return a.kind == FileKind::kRegular && a.device == b.device && a.inode == b.inode;
}

FilePlace place_of_descriptor(int descriptor) {
  FilePlace place;
  place.kind = FileKind::kOther;
  place.descriptor = descriptor;
  struct stat status {};
  if (::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode)) fill_in(place, status);
  return place;
}

}  // namespace sluice
