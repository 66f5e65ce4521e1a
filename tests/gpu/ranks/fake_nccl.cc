// A stand-in for NCCL over the stand-in for the CUDA runtime, in a library of its own that is
// opened at run time like the real one. Ranks are threads of one process. It keeps NCCL's hardest
// promises and no more: calls answer "in progress", and what they asked for comes on the stream
// only when the caller polls; messages between two ranks meet in their order; an abort ends waiting
// work; NCCL's own reductions add in an order of their own (backwards). Buffers in symmetric
// windows lie at equal offsets on all ranks, or the operation fails, as under
// NCCL_CHECK_MODE=DEBUG_GLOBAL. So do operations that are not the same on all ranks, messages of
// another length than their receiver expects, and buffers that lie inside an element; where NCCL
// itself would hang, or read what is not there. A communicator that is used after its end ends the
// process. FAKE_NCCL_VERSION sets the version. FAKE_NCCL_MULTICAST=absent: the machine has no
// windows, only null ones; =broken: joining fails unless NCCL_NVLS_ENABLE=0.
#include "tests/gpu/ranks/fake_nccl.h"

#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/ranks/fake_nccl_communicator.h"
#include "tests/gpu/ranks/fake_nccl_world.h"

using namespace sluice::test;
using World = FakeNcclWorld;

namespace sluice::test {

void require_fake_nccl(const ncclComm* comm, const char* call, FakeNcclState latest) {
  const FakeNcclState state = comm->state;
  if (state <= latest) return;
  (void)std::fprintf(stderr, "the stand-in for NCCL: %s of a communicator that was %s\n", call,
                     state == FakeNcclState::kFinalized ? "finalized" : "destroyed or aborted");
  std::abort();
}

}  // namespace sluice::test

namespace {

bool finish_split(ncclComm& comm) {
  const std::scoped_lock lock(comm.parent->mutex);
  World::Split& split = comm.parent->splits[comm.split];
  if (split.chosen != comm.parent->size) return false;
  const auto [color, key] = split.choices[static_cast<std::size_t>(comm.parent_rank)];
  auto& world = split.worlds[color];
  if (world == nullptr) world = std::make_shared<World>();
  std::vector<std::pair<int, int>> ranks;  // key and rank of the whole
  for (std::size_t i = 0; i < split.choices.size(); ++i) {
    const auto& [other_color, other_key] = split.choices[i];
    if (other_color != color) continue;
    ranks.emplace_back(other_key, static_cast<int>(i));
    if (other_key < key) ++comm.rank;
  }
  {
    std::ranges::sort(ranks);
    std::vector<int> members;
    for (const auto& [other_key, rank] : ranks)
      members.push_back(comm.parent->members[static_cast<std::size_t>(rank)]);
    const std::scoped_lock own(world->mutex);
    if (world->members.empty()) world->set_members(std::move(members));
  }
  comm.world = world;
  return true;
}

bool finish_making(ncclComm& comm) {
  if (comm.child != nullptr) {
    if (!finish_split(*comm.child)) return false;
    *comm.child_place = comm.child.release();
  }
  if (comm.window != nullptr) {
    if (++comm.polls < 2) return false;
    comm.windows.push_back(comm.window.get());
    *comm.window_place = comm.window.release();
  }
  return true;
}

std::map<std::uint64_t, std::shared_ptr<World>>& worlds() {
  static std::map<std::uint64_t, std::shared_ptr<World>> all;
  return all;
}
std::mutex worlds_mutex;

// Keeps what is left of a communicator, so that no later one has its address.
void end_communicator(ncclComm_t comm) {
  static std::mutex ended_mutex;
  static std::vector<std::unique_ptr<ncclComm>> ended;
  comm->end();
  const std::scoped_lock lock(ended_mutex);
  ended.emplace_back(comm);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const char* const text = std::getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? NCCL_VERSION_CODE : std::atoi(text);
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  FAKE_NCCL_ENTER;
  static std::uint64_t made = 0;
  const std::scoped_lock lock(worlds_mutex);
  *id = {};
  ++made;
  std::memcpy(id, &made, sizeof made);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "an error of the fake";
}
const char* ncclGetLastError(ncclComm_t comm) {
  if (fake_nccl_cannot_bind())
    return "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401";
  if (comm == nullptr || comm->world == nullptr) return "";
  const std::scoped_lock lock(comm->world->mutex);
  return comm->world->violation.empty() ? "the last words of the fake"
                                        : comm->world->violation.c_str();
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  FAKE_NCCL_ENTER;
  if (config->blocking != 0 || config->magic != 0xcafebeef) return ncclInvalidArgument;
  std::uint64_t number = 0;
  std::memcpy(&number, &id, sizeof number);
  const std::scoped_lock lock(worlds_mutex);
  auto& world = worlds()[number];
  if (world == nullptr) world = std::make_shared<World>();
  *comm = new ncclComm{.world = world, .rank = rank, .gpu = current_fake_gpu()};
  (void)sluice_fake_cuda_communicators((*comm)->gpu, 1);
  const std::scoped_lock own(world->mutex);
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  if (world->members.empty()) world->set_members(std::move(members));
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  FAKE_NCCL_ENTER_WITH(whole);
  if (config->blocking != 0) return ncclInvalidArgument;
  visit_fake_gpu(whole->gpu);
  const std::scoped_lock both(whole->mutex, whole->world->mutex);
  *part = nullptr;
  whole->child_place = part;
  whole->child.reset(new ncclComm{.parent = whole->world,
                                  .split = whole->splits,
                                  .parent_rank = whole->rank,
                                  .gpu = whole->gpu});
  (void)sluice_fake_cuda_communicators(whole->gpu, 1);
  World::Split& split = whole->world->splits[whole->splits++];
  split.choices.resize(static_cast<std::size_t>(whole->world->size));
  split.choices[static_cast<std::size_t>(whole->rank)] = {color, key};
  ++split.chosen;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  require_fake_nccl(comm, __func__, FakeNcclState::kFinalized);
  *result = ncclSystemError;
  if (fake_nccl_call_fails(__func__)) return ncclSuccess;
  *result = ncclUnhandledCudaError;
  if (fake_nccl_cannot_bind()) return ncclSuccess;
  *result = ncclInProgress;
  const std::scoped_lock own(comm->mutex);
  // NCCL's answer also ends what the call is beginning.
  if (comm->is_in_call) *result = ncclInternalError;
  if (comm->is_in_call) return ncclSuccess;
  if (comm->world == nullptr && !finish_split(*comm)) return ncclSuccess;
  {
    const std::scoped_lock lock(comm->world->mutex);
    if (!comm->has_joined) ++comm->world->joined;
    comm->has_joined = true;
    if (!comm->world->aborted.empty()) *result = ncclRemoteError;
    if (!comm->world->violation.empty()) *result = ncclInvalidArgument;
    if (*result != ncclInProgress || comm->world->joined < comm->world->size) return ncclSuccess;
  }
  if (!finish_making(*comm)) return ncclSuccess;
  if (!comm->pending.empty() && (is_fake_nccl_held() || ++comm->polls < 2)) return ncclSuccess;
  for (const auto& enqueue : std::exchange(comm->pending, {})) enqueue();
  *result = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  FAKE_NCCL_ENTER_WITH(comm);
  visit_fake_gpu(comm->gpu);
  comm->state = FakeNcclState::kFinalized;
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  require_fake_nccl(comm, __func__, FakeNcclState::kFinalized);
  visit_fake_gpu(comm->gpu);
  end_communicator(comm);
  FAKE_NCCL_ENTER;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  require_fake_nccl(comm, __func__, FakeNcclState::kFinalized);
  visit_fake_gpu(comm->gpu);
  count_fake_nccl(&fake_nccl_counts::aborts);
  if (comm->world != nullptr) comm->world->abort(comm->rank);
  comm->unfinished->wait();  // and so for what is in front of them on their streams
  wait_for_fake_nccl_aborts();
  end_communicator(comm);
  return ncclSuccess;
}

}  // extern "C"
