#include "gpu/ranks/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/memory_file.h"

namespace sluice {
namespace {

// No process can shorten it under those that have mapped it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

SharedSegment::SharedSegment(ProcessFd file, std::uint64_t size_bytes)
    : file_(std::move(file)), size_bytes_(size_bytes) {
  void* const memory =
      map_in_this_process(nullptr, size_bytes_, PROT_READ | PROT_WRITE, 0, file_.get());
  if (memory != MAP_FAILED) data_ = static_cast<std::byte*>(memory);
}

SharedSegment SharedSegment::make(std::uint64_t size_bytes) {
  ProcessFd file = make_memory_file("sluice ranks");
  if (file.get() < 0 || ::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0 ||
      ::ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0)
    return {};
  return SharedSegment(std::move(file), size_bytes);
}

// The system's numbers of the file identify it: no other file can have them meanwhile.
SharedSegment SharedSegment::open(const SegmentPlace& place, std::uint64_t size_bytes) {
  if (place.process == 0) return {};
  const std::string path = fmt::format("/proc/{}/fd/{}", place.process, place.descriptor);
  ProcessFd file = ProcessFd::opened_by([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); });
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || status.st_dev != place.device ||
      status.st_ino != place.inode || status.st_uid != ::geteuid() ||
      status.st_size != static_cast<off_t>(size_bytes) ||
      (::fcntl(file.get(), F_GET_SEALS) & kSeals) != kSeals)
    return {};
  return SharedSegment(std::move(file), size_bytes);
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept {
  *this = std::move(other);
}
SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}
SharedSegment::~SharedSegment() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

SegmentPlace SharedSegment::place() const {
  struct stat status {};
  if (data_ == nullptr || ::fstat(file_.get(), &status) != 0) return {};
  return {.process = ::getpid(),
          .descriptor = file_.get(),
          .device = status.st_dev,
          .inode = status.st_ino};
}

}  // namespace sluice
