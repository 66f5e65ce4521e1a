// Resources that belong to this process alone, and that a forked child does not keep: file
// descriptors and shared mappings. Otherwise the worker of a data loader would hold its parent's
// unnamed files, pinned memory, locks and connections for as long as the worker lives, even after
// the parent was killed.
//
// Thread rule: any thread may make, move and destroy objects. Invariant: a child of fork() has
// closed its copy of every descriptor before fork() returns in it, and its objects are empty. A
// child of vfork() or posix_spawn() keeps the copies until it executes its program.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace sluice {

// While an object lives, fork() waits on every thread of the process. So a child has either all or
// nothing of what the thread does meanwhile. The thread must neither fork nor allocate memory, nor
// make or destroy another object of this class: the allocator, too, may wait in fork().
class ForkPause {
 public:
  ForkPause();
  ~ForkPause();
  ForkPause(const ForkPause&) = delete;
  ForkPause& operator=(const ForkPause&) = delete;
};

// A descriptor with one owner, in one process. The destructor closes the descriptor. The class is
// movable, but not copyable.
class ProcessFd {
 public:
  ProcessFd() = default;
  // A child that is forked between the opening and this call keeps its copy. If that does harm, use
  // opened_by() instead.
  explicit ProcessFd(int descriptor);
  // Calls `open` under a ForkPause. The function returns a descriptor, or -1 and sets errno.
  template <class Open>
  static ProcessFd opened_by(const Open& open) {
    ProcessFd opened;
    {
      const ForkPause pause;
      opened.take(open(), pause);
    }
    return opened;
  }
  ProcessFd(ProcessFd&& other) noexcept;
  ProcessFd& operator=(ProcessFd&& other) noexcept;
  ~ProcessFd();

  // In a forked child, the result is -1.
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  // Makes this object, which is empty, the owner of the descriptor.
  void take(int descriptor, const ForkPause& pause);
  // Returns the descriptor, which the object no longer owns.
  int release(const ForkPause& pause);

 private:
  friend struct ProcessFds;
  int unlink();

  int descriptor_ = -1;
  // The neighbors in the list of all objects with a descriptor.
  ProcessFd* previous_ = nullptr;
  ProcessFd* next_ = nullptr;
};

// Maps a file as mmap() does with MAP_SHARED and further `flags`. The mapping is not in the memory
// of children. Returns MAP_FAILED and sets errno if the kernel refuses.
void* map_in_this_process(void* address, std::size_t size_bytes, int protection, int flags,
                          int descriptor);

}  // namespace sluice
