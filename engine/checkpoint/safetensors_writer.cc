#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <set>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/safetensors.h>
#include "base/file_flush.h"
#include "base/random_suffix.h"
#include "base/unique_fd.h"
#include "base/utf8.h"
#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

constexpr int kLinksMax = 40;  // as Linux
constexpr std::uint64_t kPieceBytes = 4 << 20;
// No file is longer, and the header needs a part of this.
constexpr std::uint64_t kAllTensorsBytesMax = std::numeric_limits<off_t>::max() / 2;

[[noreturn]] void fail_writing(const char* what, const std::string& path, int error) {
  const bool is_input = error == ENOENT || error == EACCES || error == ENOTDIR || error == EROFS ||
                        error == EPERM || error == EISDIR || error == ENAMETOOLONG ||
                        error == ELOOP;
  throw Error(file_error_code(error, is_input ? ErrorCode::kInput : ErrorCode::kIo),
              fmt::format("{} of \"{}\" failed: {}; {}", what, path, errno_text(error),
                          file_remedy(error)));
}

// The file that gets the new content: behind the links, a regular one or none. A pipe or a device
// would be replaced, and its reader would get no bytes.
std::string replaced_file(const std::string& path) {
  namespace fs = std::filesystem;
  fs::path file = path;
  std::error_code error;
  fs::file_status status = fs::symlink_status(file, error);
  for (int links = 0; fs::is_symlink(status); ++links) {
    if (links == kLinksMax) fail_writing("creation", path, ELOOP);
    file = file.parent_path() / fs::read_symlink(file, error);
    if (error) fail_writing("creation", path, error.value());
    status = fs::symlink_status(file, error);
  }
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no regular file, which a new one could replace; name "
                            "another file",
                            path));
  return file.string();
}

// The new content of a file, under a name of its own until it is whole. As far as the system
// allows, it gets the owner and the mode of the file that it replaces.
class Replacement {
 public:
  explicit Replacement(const std::string& path)
      : path_(replaced_file(path)), own_(fmt::format("{}.{}", path_, random_suffix())) {
    file_ = UniqueFd(::open(own_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_) fail_writing("creation", path, errno);
    struct stat old {};
    if (::stat(path_.c_str(), &old) == 0 && ::fchown(file_.get(), old.st_uid, old.st_gid) == 0)
      (void)::fchmod(file_.get(), old.st_mode & 0777);
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement() {
    if (!is_whole_) (void)::unlink(own_.c_str());
  }

  // Finds out that a large file has no room before its bytes are made and written.
  void reserve(std::uint64_t size_bytes) {
    int result = 0;
    do {
      result = ::fallocate(file_.get(), 0, 0, static_cast<off_t>(size_bytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
      fail_writing("allocation", path_, errno);
  }
  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t done = ::write(file_.get(), bytes.data(), bytes.size());
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail_writing("write", path_, errno);
      bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
  }
  void commit() {
    if (const int error = flush_file(file_.get()); error != 0) fail_writing("fsync", path_, error);
    if (::rename(own_.c_str(), path_.c_str()) != 0) fail_writing("renaming", path_, errno);
    is_whole_ = true;
    const std::string folder = std::filesystem::path(path_).parent_path().string();
    if (const int error = flush_folder(folder); error != 0)
      fail_writing("fsync of the folder", path_, error);
  }

 private:
  std::string path_;
  std::string own_;
  UniqueFd file_;
  bool is_whole_ = false;
};

[[noreturn]] void refuse_to_write(const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, "write_safetensors_file: " + why);
}

// Returns kAllTensorsBytesMax + 1 for every larger size.
std::uint64_t bounded_bytes(const SafetensorsTensor& tensor) {
  std::uint64_t bytes = safetensors_element_bytes(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape) {
    if (extent == 0) return 0;
    bytes = bytes > kAllTensorsBytesMax / extent ? kAllTensorsBytesMax + 1 : bytes * extent;
  }
  return bytes;
}

std::vector<SafetensorsEntry> entries_of(std::span<const SafetensorsTensor> tensors) {
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> names;
  std::uint64_t all_bytes = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (!is_utf8(tensor.name))
      refuse_to_write(fmt::format("the name \"{}\" is not UTF-8", valid_utf8(tensor.name)));
    if (safetensors_element_bytes(tensor.dtype) == 0)
      refuse_to_write(fmt::format("tensor \"{}\" is of type \"{}\", expected F32, BF16, F16 or I16",
                                  tensor.name, valid_utf8(tensor.dtype)));
    if (tensor.name == "__metadata__" || !names.insert(tensor.name).second)
      refuse_to_write(fmt::format("the name \"{}\" is taken", tensor.name));
    const std::uint64_t bytes = bounded_bytes(tensor);
    if (bytes > kAllTensorsBytesMax - all_bytes)
      refuse_to_write(
          fmt::format("with tensor \"{}\" of shape [{}], the tensors have more than {} bytes",
                      tensor.name, fmt::join(tensor.shape, ", "), kAllTensorsBytesMax));
    all_bytes += bytes;
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  return entries;
}

void check_metadata(const std::map<std::string, std::string>& metadata) {
  for (const auto& [key, text] : metadata) {
    if (!is_utf8(key) || !is_utf8(text))
      refuse_to_write(
          fmt::format("the metadata \"{}\" is not UTF-8 in its key or text", valid_utf8(key)));
  }
}

}  // namespace

void write_safetensors_file(const std::string& path, std::span<const SafetensorsTensor> tensors,
                            const std::map<std::string, std::string>& metadata,
                            const SafetensorsBytes& bytes) {
  const std::vector<SafetensorsEntry> entries = entries_of(tensors);
  check_metadata(metadata);
  if (!bytes) refuse_to_write("there is no function for the bytes");
  const std::string beginning = safetensors_beginning(entries, metadata);
  std::uint64_t file_bytes = beginning.size();
  for (const SafetensorsEntry& entry : entries) file_bytes += entry.size_bytes();
  Replacement file(path);
  file.reserve(file_bytes);
  file.write(std::as_bytes(std::span(beginning)));
  std::vector<std::byte> piece;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::uint64_t size = entries[i].size_bytes();
    for (std::uint64_t at = 0; at < size; at += kPieceBytes) {
      piece.resize(std::min(kPieceBytes, size - at));
      bytes(i, at, piece);
      file.write(piece);
    }
  }
  file.commit();
}

}  // namespace sluice
