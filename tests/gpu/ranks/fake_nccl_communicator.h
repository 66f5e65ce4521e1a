// The communicators of the stand-in for NCCL (fake_nccl.cc). Only the source files of the stand-in
// include this header. Thread rule: one thread at a time makes calls, and any thread may poll.
// Include <nccl.h> before this header.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/gpu/ranks/fake_nccl_world.h"

extern "C" int sluice_fake_cuda_communicators(int gpu, int change);

struct ncclWindow_vidmem {
  const char* memory;
  std::size_t size_bytes;
};

// Counts the operations of a communicator that are on their streams and have not ended.
class FakeNcclUnfinished {
 public:
  void add(int change) {
    const std::scoped_lock lock(mutex_);
    count_ += change;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;  // guarded by mutex_
};

namespace sluice::test {

// A finalized communicator answers questions. After ncclCommDestroy or ncclCommAbort, no function
// may use the communicator.
enum class FakeNcclState : std::uint8_t { kOpen, kFinalized, kGone };

}  // namespace sluice::test

struct ncclComm {
  std::atomic<sluice::test::FakeNcclState> state = sluice::test::FakeNcclState::kOpen;
  std::mutex mutex = {};  // guards the fields that calls and polls use
  std::shared_ptr<sluice::test::FakeNcclWorld> world;
  int rank = 0;
  bool is_in_call = false;  // a call has not returned
  bool has_joined = false;  // world->joined counts this rank
  // During a split, `parent` is the world of the communicator that is split. The field `split` is
  // the number of this split.
  std::shared_ptr<sluice::test::FakeNcclWorld> parent;
  std::uint64_t split = 0;
  int parent_rank = 0;
  int gpu = 0;
  std::uint64_t operations = 0;
  std::uint64_t splits = 0;
  std::uint64_t windows_made = 0;
  std::vector<ncclWindow_t> windows;  // deleted with the communicator
  // The communicator or window that a thread of NCCL is still making. The call for this object has
  // already returned ncclSuccess. The caller's pointer stays null until a poll finds that the
  // object is complete.
  std::unique_ptr<ncclComm> child;
  ncclComm_t* child_place = nullptr;
  std::unique_ptr<ncclWindow_vidmem> window;
  ncclWindow_t* window_place = nullptr;
  // These operations are not enqueued on their streams before the second poll.
  std::vector<std::function<void()>> pending;
  int polls = 0;
  std::shared_ptr<FakeNcclUnfinished> unfinished = std::make_shared<FakeNcclUnfinished>();

  ~ncclComm() { end(); }
  // Gives back all that the communicator has. The communicator is gone then.
  void end() {
    if (state.exchange(sluice::test::FakeNcclState::kGone) == sluice::test::FakeNcclState::kGone)
      return;
    (void)sluice_fake_cuda_communicators(gpu, -1);
    for (const ncclWindow_t registered : windows) delete registered;
    windows.clear();
    child.reset();
    window.reset();
    pending.clear();
    parent.reset();
    world.reset();
  }
};

namespace sluice::test {

// The process ends with a message if the communicator's state is beyond `latest`.
void require_fake_nccl(const ncclComm* comm, const char* call,
                       FakeNcclState latest = FakeNcclState::kOpen);

// Returns the current GPU of this thread.
int current_fake_gpu();
// Like NCCL, the function makes the communicator's GPU the current GPU, and then restores the
// former GPU.
void visit_fake_gpu(int gpu);

}  // namespace sluice::test

// Every function of the stand-in that may fail begins with this macro.
#define FAKE_NCCL_ENTER \
  if (fake_nccl_call_fails(__func__)) return ncclSystemError
// With a communicator.
#define FAKE_NCCL_ENTER_WITH(comm)   \
  require_fake_nccl(comm, __func__); \
  FAKE_NCCL_ENTER
// The same, where the communicator may be finalized.
#define FAKE_NCCL_ENTER_LATE(comm)                              \
  require_fake_nccl(comm, __func__, FakeNcclState::kFinalized); \
  FAKE_NCCL_ENTER
