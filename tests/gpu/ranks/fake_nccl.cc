// A stand-in for NCCL over the stand-in for the CUDA runtime, in a library of its own that is
// opened at run time like the real one. Ranks are threads of one process. It keeps NCCL's hardest
// promises and no more: calls answer "in progress", and what they asked for comes on the stream
// only when the caller polls; messages between two ranks meet in their order; an abort ends waiting
// work; NCCL's own reductions add in an order of their own (backwards). Buffers in symmetric
// windows lie at equal offsets on all ranks, or the operation fails, as under
// NCCL_CHECK_MODE=DEBUG_GLOBAL. FAKE_NCCL_VERSION sets the version. FAKE_NCCL_MULTICAST=absent: the
// machine has no windows, only null ones; =broken: joining fails unless NCCL_NVLS_ENABLE=0.
#include "tests/gpu/ranks/fake_nccl.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/gpu/ranks/fake_nccl_communicator.h"
#include "tests/gpu/ranks/fake_nccl_elements.h"
#include "tests/gpu/ranks/fake_nccl_world.h"

using namespace sluice::test;
using World = FakeNcclWorld;

extern "C" void sluice_fake_cuda_launch(cudaStream_t stream, void (*work)(void*), void* data);

namespace {
thread_local bool is_in_group = false;
thread_local std::vector<FakeNcclMessage> group;
thread_local std::vector<std::function<void()>> group_words;  // reductions of words
thread_local ncclComm_t group_comm = nullptr;
thread_local cudaStream_t group_stream = nullptr;
thread_local ncclComm_t begun = nullptr;

void launch(cudaStream_t stream, std::function<void()> work) {
  const auto run = [](void* data) { run_fake_nccl_work(data); };
  sluice_fake_cuda_launch(stream, run, new std::function<void()>(std::move(work)));
}

ncclResult_t add_to_group(const FakeNcclMessage& message, ncclComm_t comm, cudaStream_t stream) {
  group.push_back(message);
  group_comm = comm;
  group_stream = stream;
  return ncclInProgress;
}

FakeNcclOffset offset_of(ncclComm_t comm, const void* data) {
  for (const ncclWindow_t window : comm->windows) {
    const std::ptrdiff_t offset = static_cast<const char*>(data) - window->memory;
    if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(window->size_bytes)) return offset;
  }
  return kOutsideOfWindows;
}

// Up to 2.25 a thread keeps what it has begun until it asks for something of that communicator.
bool begins_call(ncclComm_t comm) {
  const char* const version = std::getenv("FAKE_NCCL_VERSION");
  if (version == nullptr || std::atoi(version) >= NCCL_VERSION(2, 26, 2)) return true;
  if (begun != nullptr && begun != comm) return false;  // in NCCL: a fault of its memory
  begun = comm;
  return true;
}

ncclResult_t start(ncclComm_t comm, cudaStream_t stream, std::function<void()> work) {
  if (!begins_call(comm)) return ncclInternalError;
  const std::scoped_lock lock(comm->mutex);
  comm->pending.push_back([stream, work = std::move(work), unfinished = comm->unfinished] {
    unfinished->add(1);
    launch(stream, [work, unfinished] {
      work();
      unfinished->add(-1);
    });
  });
  comm->polls = 0;
  return ncclInProgress;
}

// Words of 64 bits, in which no order shows: not counted.
ncclResult_t start_of_words(const void* source, void* target, std::size_t count,
                            ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  std::function<void()> work =
      [world = comm->world, rank = comm->rank, operation = comm->operations++, target, count,
       is_sum = reduction == ncclSum,
       part =
           FakeNcclPart{source, "all-reduce", {offset_of(comm, source), offset_of(comm, target)}}] {
        std::vector<std::uint64_t> words(count);
        if (world->meet(operation, rank, part,
                        [&](const auto& parts) { reduce_words(parts, is_sum, words); }))
          std::memcpy(target, words.data(), count * sizeof(std::uint64_t));
      };
  if (!is_in_group) count_fake_nccl(&fake_nccl_counts::word_launches);
  if (!is_in_group) return start(comm, stream, std::move(work));
  group_words.push_back(std::move(work));
  group_comm = comm;
  group_stream = stream;
  return ncclInProgress;
}

bool finish_split(ncclComm& comm) {
  const std::scoped_lock lock(comm.parent->mutex);
  World::Split& split = comm.parent->splits[comm.split];
  if (split.chosen != comm.parent->size) return false;
  const auto [color, key] = split.choices[static_cast<std::size_t>(comm.parent_rank)];
  auto& world = split.worlds[color];
  if (world == nullptr) world = std::make_shared<World>();
  for (const auto& [other_color, other_key] : split.choices) {
    if (other_color != color) continue;
    if (other_key < key) ++comm.rank;
  }
  {
    const std::scoped_lock own(world->mutex);
    world->size = 0;
    for (const auto& choice : split.choices) world->size += choice.first == color ? 1 : 0;
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
  world->set_size(size);
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  FAKE_NCCL_ENTER;
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

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  FAKE_NCCL_ENTER;
  if (begun == comm) begun = nullptr;
  const std::scoped_lock lock(comm->world->mutex);
  *count = comm->world->size;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  FAKE_NCCL_ENTER;
  visit_fake_gpu(comm->gpu);
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  visit_fake_gpu(comm->gpu);
  delete comm;
  FAKE_NCCL_ENTER;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  visit_fake_gpu(comm->gpu);
  count_fake_nccl(&fake_nccl_counts::aborts);
  if (comm->world != nullptr) comm->world->abort(comm->rank);
  comm->unfinished->wait();  // and so for what is in front of them on their streams
  wait_for_fake_nccl_aborts();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  FAKE_NCCL_ENTER;
  is_in_group = true;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  is_in_group = false;
  const bool fails = fake_nccl_call_fails(__func__);
  if (fails) group.clear();
  if (fails) group_words.clear();
  if (!group_words.empty()) {
    if (!group.empty()) return ncclInvalidUsage;  // a group is of one kind here
    count_fake_nccl(&fake_nccl_counts::word_launches);
    return start(group_comm, group_stream, [all = std::exchange(group_words, {})] {
      for (const auto& work : all) work();
    });
  }
  if (group.empty()) return fails ? ncclSystemError : ncclSuccess;
  return start(group_comm, group_stream,
               [world = group_comm->world, rank = group_comm->rank,
                messages = std::exchange(group, {})] { world->transfer(rank, messages); });
}
ncclResult_t ncclSend(const void* data, std::size_t size, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  return add_to_group({const_cast<void*>(data), size, peer, true}, comm, stream);
}
ncclResult_t ncclRecv(void* data, std::size_t size, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  return add_to_group({data, size, peer, false}, comm, stream);
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  if (does_fake_nccl_hang()) {
    const std::shared_ptr<World> world = comm->world;  // an abort deletes the communicator
    {
      const std::scoped_lock lock(comm->mutex);
      comm->is_in_call = true;
    }
    world->wait_for_abort(comm->rank);
    return ncclInternalError;
  }
  const std::size_t bytes = size * size_of(type);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                bytes, part = FakeNcclPart{source, "all-gather", {offset_of(comm, target)}}] {
                 world->meet(operation, rank, part, [&](const auto& parts) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     if (parts[i] != static_cast<char*>(target) + i * bytes)
                       std::memcpy(static_cast<char*>(target) + i * bytes, parts[i], bytes);
                 });
               });
}
ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  const std::size_t bytes = size * size_of(type);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                bytes, root, part = FakeNcclPart{source}] {
                 world->meet(operation, rank, part, [&](const auto& parts) {
                   if (rank != root)
                     std::memcpy(target, parts[static_cast<std::size_t>(root)], bytes);
                 });
               });
}
ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t elements,
                               ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  count_fake_nccl(&fake_nccl_counts::reductions);
  return start(
      comm, stream,
      [world = comm->world, rank = comm->rank, operation = comm->operations++, target, elements,
       type, part = FakeNcclPart{source, "reduce-scatter", {offset_of(comm, source)}}] {
        const std::size_t first = static_cast<std::size_t>(rank) * elements;
        std::vector<float> sums(elements);
        if (!world->meet(operation, rank, part,
                         [&](const auto& parts) { add_backwards(parts, type, first, sums); }))
          return;
        for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
      });
}
ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t elements,
                           ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                           cudaStream_t stream) {
  FAKE_NCCL_ENTER;
  if (type == ncclUint64 && (reduction == ncclSum || reduction == ncclMin))
    return start_of_words(source, target, elements, reduction, comm, stream);
  if (type == ncclUint64 || reduction != ncclSum) return ncclInvalidArgument;
  count_fake_nccl(&fake_nccl_counts::reductions);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                elements, type,
                part = FakeNcclPart{
                    source, "all-reduce", {offset_of(comm, source), offset_of(comm, target)}}] {
                 std::vector<float> sums(elements);
                 if (!world->meet(operation, rank, part,
                                  [&](const auto& parts) { add_backwards(parts, type, 0, sums); }))
                   return;
                 for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
               });
}

}  // extern "C"
