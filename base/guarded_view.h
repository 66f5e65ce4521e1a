// A view makes memory accessible at a second address. The owner of the memory keeps using the first
// address. The pages of the view are accessible only between open() and close(). Any other access
// through the view ends the process with SIGSEGV, in the instruction that made the access. So the
// process ends if code uses memory that was already given back. The kernel protects whole pages of
// 4 KiB, so other data on an open page is accessible, too. In /proc/PID/maps, the memory is called
// "sluice leases".
//
// Thread rule: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace sluice {

class GuardedView {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  // Replaces the pages of `memory` with zero-filled pages. The new pages also have a second
  // address. The caller still owns `memory`. The memory must begin at the start of a page, and must
  // outlive the view. `purpose` names the memory in the error message. If `memory` is empty, the
  // view is empty.
  // Fails with kOutOfMemory if the kernel refuses to make a mapping or a memory file. If the
  // constructor fails, some pages of `memory` may be inaccessible.
  GuardedView(std::span<std::byte> memory, const char* purpose);
  ~GuardedView();
  GuardedView(const GuardedView&) = delete;
  GuardedView& operator=(const GuardedView&) = delete;

  bool contains(const std::byte* address) const {
    return address >= memory_.data() && address < memory_.data() + memory_.size();
  }
  // Opens the part of the memory that starts at the address `begin` and has `size_bytes` bytes.
  // Returns the address in the view. The same bytes may be opened several times. Each call of
  // open() needs its own call of close(). Fails with kOutOfMemory if the kernel refuses to divide
  // the mapping further.
  std::byte* open(const std::byte* begin, std::uint64_t size_bytes, Access access);
  // Undoes one earlier call of open() that had the same arguments.
  void close(const std::byte* begin, std::uint64_t size_bytes, Access access) noexcept;

 private:
  struct Page {
    std::uint32_t readers = 0;
    std::uint32_t writers = 0;
    int protection() const;
  };
  // Adds `change` to the number of users of each page in the range. Each page then gets the
  // protection that its new number of users requires.
  bool count(const std::byte* begin, std::uint64_t size_bytes, Access access, int change);

  std::span<std::byte> memory_;
  std::byte* view_ = nullptr;
  std::uint64_t view_bytes_ = 0;
  std::mutex mutex_;
  std::vector<Page> pages_;  // guarded by mutex_
};

}  // namespace sluice
