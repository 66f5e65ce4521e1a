#include "base/process_fd.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

#include <sluice/error.h>

namespace sluice {

// The handlers of fork(), and their data, which is never destroyed.
struct ProcessFds {
  static constinit std::mutex mutex;
  static constinit ProcessFd* first;  // guarded by mutex

  static void before_fork() { mutex.lock(); }
  static void after_fork() { mutex.unlock(); }
  // The forking thread, the only one in the child, has the lock, so the list is whole. Only calls
  // that are allowed after a fork are made here.
  static void in_child() {
    while (first != nullptr) {
      ProcessFd* const object = first;
      ::close(object->unlink());
    }
    mutex.unlock();
  }
};
constinit std::mutex ProcessFds::mutex;
constinit ProcessFd* ProcessFds::first = nullptr;

ForkPause::ForkPause() {
  static const int result =
      ::pthread_atfork(ProcessFds::before_fork, ProcessFds::after_fork, ProcessFds::in_child);
  SLUICE_CHECK(result == 0, "fork handlers can be registered");
  ProcessFds::mutex.lock();
}

ForkPause::~ForkPause() {
  ProcessFds::mutex.unlock();
}

ProcessFd::ProcessFd(int descriptor) {
  take(descriptor, ForkPause());
}

ProcessFd::ProcessFd(ProcessFd&& other) noexcept {
  *this = std::move(other);
}

ProcessFd& ProcessFd::operator=(ProcessFd&& other) noexcept {
  if (descriptor_ < 0 && other.descriptor_ < 0) return *this;
  const ForkPause pause;
  const int descriptor = unlink();
  take(other.unlink(), pause);
  other.take(descriptor, pause);
  return *this;
}

// Closed under the lock: a child of a fork between taking it from the list and closing would keep
// it.
ProcessFd::~ProcessFd() {
  if (descriptor_ < 0) return;
  const ForkPause pause;
  ::close(unlink());
}

void ProcessFd::take(int descriptor, const ForkPause&) {
  if (descriptor < 0) return;
  descriptor_ = descriptor;
  next_ = ProcessFds::first;
  if (next_ != nullptr) next_->previous_ = this;
  ProcessFds::first = this;
}

int ProcessFd::release(const ForkPause&) {
  return unlink();
}

int ProcessFd::unlink() {
  if (descriptor_ < 0) return -1;
  (previous_ != nullptr ? previous_->next_ : ProcessFds::first) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  previous_ = next_ = nullptr;
  return std::exchange(descriptor_, -1);
}

void* map_in_this_process(void* address, std::size_t size_bytes, int protection, int flags,
                          int descriptor) {
  const ForkPause pause;
  void* const memory = ::mmap(address, size_bytes, protection, MAP_SHARED | flags, descriptor, 0);
  const int error = errno;
  if (memory != MAP_FAILED) (void)::madvise(memory, size_bytes, MADV_DONTFORK);
  errno = error;
  return memory;
}

}  // namespace sluice
