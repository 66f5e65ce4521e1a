#include "base/guarded_view.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/memory_file.h"
#include "base/process_fd.h"

namespace sluice {
namespace {

[[noreturn]] void fail(std::uint64_t size_bytes, const char* purpose, const char* call) {
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("cannot map {} of host memory for {} a second time ({}: {}); set "
                          "memory.guard to \"off\"",
                          format_bytes(size_bytes), purpose, call, errno_text(errno)));
}

}  // namespace

GuardedView::GuardedView(std::span<std::byte> memory, const char* purpose) : memory_(memory) {
  if (memory.empty()) return;
  SLUICE_CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % kPageBytes == 0,
               "guarded memory begins at a page");
  view_bytes_ = align_up(memory.size(), kPageBytes);
  const ProcessFd file = make_memory_file("sluice leases");
  if (file.get() < 0) fail(view_bytes_, purpose, "memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(view_bytes_)) != 0)
    fail(view_bytes_, purpose, "ftruncate");
  // As for every buffer (base/aligned_buffer.cc): a forked child has no use for it.
  void* const view = map_in_this_process(nullptr, view_bytes_, PROT_NONE, 0, file.get());
  if (view == MAP_FAILED) fail(view_bytes_, purpose, "mmap");
  view_ = static_cast<std::byte*>(view);
  if (map_in_this_process(memory.data(), view_bytes_, PROT_READ | PROT_WRITE,
                          MAP_FIXED | MAP_POPULATE, file.get()) == MAP_FAILED) {
    ::munmap(view_, view_bytes_);
    fail(view_bytes_, purpose, "mmap");
  }
  pages_.resize(view_bytes_ / kPageBytes);
}

GuardedView::~GuardedView() {
  if (view_ != nullptr) ::munmap(view_, view_bytes_);
}

int GuardedView::Page::protection() const {
  if (writers != 0) return PROT_READ | PROT_WRITE;
  return readers != 0 ? PROT_READ : PROT_NONE;
}

std::byte* GuardedView::open(const std::byte* begin, std::uint64_t size_bytes, Access access) {
  SLUICE_CHECK(contains(begin) && contains(begin + size_bytes - 1), "lent memory is guarded");
  if (!count(begin, size_bytes, access, 1)) {
    const int error = errno;
    (void)count(begin, size_bytes, access, -1);
    errno = error;
    fail(size_bytes, "a lease", "mprotect");
  }
  return view_ + (begin - memory_.data());
}

void GuardedView::close(const std::byte* begin, std::uint64_t size_bytes, Access access) noexcept {
  // Pages that the kernel refuses to protect stay accessible: nothing is lost but the guard.
  (void)count(begin, size_bytes, access, -1);
}

bool GuardedView::count(const std::byte* begin, std::uint64_t size_bytes, Access access,
                        int change) {
  const auto offset = static_cast<std::uint64_t>(begin - memory_.data());
  const std::uint64_t first = offset / kPageBytes;
  const std::uint64_t end = (offset + size_bytes - 1) / kPageBytes + 1;
  const std::scoped_lock lock(mutex_);
  for (std::uint64_t page = first; page != end; ++page) {
    std::uint32_t& users = access == Access::kWrite ? pages_[page].writers : pages_[page].readers;
    users += static_cast<std::uint32_t>(change);
  }
  bool is_done = true;
  for (std::uint64_t page = first; page != end;) {  // one call for pages of equal protection
    const std::uint64_t run = page;
    const int protection = pages_[run].protection();
    while (page != end && pages_[page].protection() == protection) ++page;
    is_done &= ::mprotect(view_ + run * kPageBytes, (page - run) * kPageBytes, protection) == 0;
  }
  return is_done;
}

}  // namespace sluice
