// The communicators of the stand-in for NCCL (fake_nccl.cc), for the files that it consists of.
// Thread rule: a communicator is called by one thread at a time.
// Include <nccl.h> before this header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tests/gpu/ranks/fake_nccl_world.h"

extern "C" int sluice_fake_cuda_communicators(int gpu, int change);

struct ncclWindow_vidmem {
  const char* memory;
  std::size_t size_bytes;
};

struct ncclComm {
  std::shared_ptr<sluice::test::FakeNcclWorld> world;
  int rank = 0;
  bool has_joined = false;  // world->joined counts it
  // A split that is under way: the parent's, and which.
  std::shared_ptr<sluice::test::FakeNcclWorld> parent;
  std::uint64_t split = 0;
  int parent_rank = 0;
  int gpu = 0;
  std::uint64_t operations = 0;
  std::uint64_t splits = 0;
  std::vector<ncclWindow_t> windows;  // gone with it
  // The communicator or window that a thread of NCCL still makes. The call for it has answered
  // ncclSuccess, and its place holds null until a poll finds that all is there.
  std::unique_ptr<ncclComm> child;
  ncclComm_t* child_place = nullptr;
  std::unique_ptr<ncclWindow_vidmem> window;
  ncclWindow_t* window_place = nullptr;
  // Comes to its stream at the poll after next.
  std::vector<std::function<void()>> pending;
  int polls = 0;

  ~ncclComm() {
    (void)sluice_fake_cuda_communicators(gpu, -1);
    for (const ncclWindow_t window : windows) delete window;
  }
};

namespace sluice::test {

// The current GPU of this thread.
int current_fake_gpu();
// NCCL makes the communicator's GPU the current one, and then sets back what was before.
void visit_fake_gpu(int gpu);

}  // namespace sluice::test

// Every call of the stand-in that may fail begins so.
#define FAKE_NCCL_ENTER \
  if (fake_nccl_call_fails(__func__)) return ncclSystemError
