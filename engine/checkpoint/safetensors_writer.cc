#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/safetensors.h>
#include "base/file_flush.h"
#include "base/random_suffix.h"
#include "base/unique_fd.h"
#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPieceBytes = 4 << 20;

[[noreturn]] void fail_writing(const char* what, const std::string& path, int error) {
  const bool is_input = error == ENOENT || error == EACCES || error == ENOTDIR || error == EROFS ||
                        error == EPERM || error == EISDIR || error == ENAMETOOLONG;
  throw Error(file_error_code(error, is_input ? ErrorCode::kInput : ErrorCode::kIo),
              fmt::format("{} of \"{}\" failed: {}; {}", what, path, errno_text(error),
                          file_remedy(error)));
}

// The new content of a file, under a name of its own until it is whole. As far as the system
// allows, it gets the owner and the mode of the file that it replaces.
class Replacement {
 public:
  explicit Replacement(const std::string& path)
      : path_(path), own_(fmt::format("{}.{}", path, random_suffix())) {
    file_ = UniqueFd(::open(own_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_) fail_writing("creation", path, errno);
    struct stat old {};
    if (::stat(path.c_str(), &old) == 0 && ::fchown(file_.get(), old.st_uid, old.st_gid) == 0)
      (void)::fchmod(file_.get(), old.st_mode & 0777);
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement() {
    if (!is_whole_) (void)::unlink(own_.c_str());
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

std::vector<SafetensorsEntry> entries_of(std::span<const SafetensorsTensor> tensors) {
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> names;
  for (const SafetensorsTensor& tensor : tensors) {
    if (safetensors_element_bytes(tensor.dtype) == 0)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("write_safetensors_file: tensor \"{}\" is of type \"{}\", expected "
                              "F32, BF16, F16 or I16",
                              tensor.name, tensor.dtype));
    if (tensor.name == "__metadata__" || !names.insert(tensor.name).second)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("write_safetensors_file: the name \"{}\" is taken", tensor.name));
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  return entries;
}

}  // namespace

void write_safetensors_file(const std::string& path, std::span<const SafetensorsTensor> tensors,
                            const std::map<std::string, std::string>& metadata,
                            const SafetensorsBytes& bytes) {
  const std::vector<SafetensorsEntry> entries = entries_of(tensors);
  Replacement file(path);
  const std::string beginning = safetensors_beginning(entries, metadata);
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
