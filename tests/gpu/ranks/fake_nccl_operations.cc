// The operations of the stand-in for NCCL: groups of messages, gathers, broadcasts and reductions.
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/ranks/fake_nccl.h"
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

// NCCL wants all of this to be equal on all ranks of an operation.
std::string call_of(const char* kind, std::size_t count, ncclDataType_t type,
                    const std::string& more = "") {
  return std::string(kind) + " of " + std::to_string(count) + " " + name_of(type) + more;
}
std::string reduced_by(ncclRedOp_t reduction) {
  return reduction == ncclSum ? " by sum" : reduction == ncclMin ? " by minimum" : " otherwise";
}

// NCCL's kernels read and write whole elements.
bool are_aligned(ncclComm_t comm, const std::string& call, ncclDataType_t type,
                 std::initializer_list<const void*> places) {
  for (const void* const place : places) {
    if (reinterpret_cast<std::uintptr_t>(place) % size_of(type) == 0) continue;
    comm->world->violate(call + ": a buffer that lies inside an element");
    return false;
  }
  return true;
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
  const std::string call = call_of("all-reduce", count, ncclUint64, reduced_by(reduction));
  std::function<void()> work =
      [world = comm->world, rank = comm->rank, operation = comm->operations++, target, count,
       is_sum = reduction == ncclSum,
       part = FakeNcclPart{source, call, {offset_of(comm, source), offset_of(comm, target)}}] {
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

}  // namespace

extern "C" {

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  FAKE_NCCL_ENTER_LATE(comm);
  if (begun == comm) begun = nullptr;
  const std::scoped_lock lock(comm->world->mutex);
  *count = comm->world->size;
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
  FAKE_NCCL_ENTER_WITH(comm);
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  return add_to_group({const_cast<void*>(data), size, peer, true}, comm, stream);
}
ncclResult_t ncclRecv(void* data, std::size_t size, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  FAKE_NCCL_ENTER_WITH(comm);
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  return add_to_group({data, size, peer, false}, comm, stream);
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_ENTER_WITH(comm);
  if (does_fake_nccl_hang()) {
    const std::shared_ptr<World> world = comm->world;  // an abort takes it from the communicator
    {
      const std::scoped_lock lock(comm->mutex);
      comm->is_in_call = true;
    }
    world->wait_for_abort(comm->rank);
    return ncclInternalError;
  }
  const std::string call = call_of("all-gather", size, type);
  if (!are_aligned(comm, call, type, {source, target})) return ncclInvalidArgument;
  const std::size_t bytes = size * size_of(type);
  comm->world->count_from_all(comm->rank, bytes);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                bytes, part = FakeNcclPart{source, call, {offset_of(comm, target)}}] {
                 world->meet(operation, rank, part, [&](const auto& parts) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     if (parts[i] != static_cast<char*>(target) + i * bytes)
                       std::memcpy(static_cast<char*>(target) + i * bytes, parts[i], bytes);
                 });
               });
}
ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  FAKE_NCCL_ENTER_WITH(comm);
  const std::string call = call_of("broadcast", size, type, " from rank " + std::to_string(root));
  if (!are_aligned(comm, call, type, {source, target})) return ncclInvalidArgument;
  const std::size_t bytes = size * size_of(type);
  if (comm->rank != root) comm->world->count_bytes(comm->rank, root, bytes);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                bytes, root, part = FakeNcclPart{source, call}] {
                 world->meet(operation, rank, part, [&](const auto& parts) {
                   if (rank != root)
                     std::memcpy(target, parts[static_cast<std::size_t>(root)], bytes);
                 });
               });
}
ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t elements,
                               ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                               cudaStream_t stream) {
  FAKE_NCCL_ENTER_WITH(comm);
  const std::string call = call_of("reduce-scatter", elements, type, reduced_by(reduction));
  if (!are_aligned(comm, call, type, {source, target})) return ncclInvalidArgument;
  count_fake_nccl(&fake_nccl_counts::reductions);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, target,
                elements, type, part = FakeNcclPart{source, call, {offset_of(comm, source)}}] {
                 const std::size_t first = static_cast<std::size_t>(rank) * elements;
                 std::vector<float> sums(elements);
                 if (!world->meet(operation, rank, part, [&](const auto& parts) {
                       add_backwards(parts, type, first, sums);
                     }))
                   return;
                 for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
               });
}
ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t elements,
                           ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                           cudaStream_t stream) {
  FAKE_NCCL_ENTER_WITH(comm);
  const std::string call = call_of("all-reduce", elements, type, reduced_by(reduction));
  if (!are_aligned(comm, call, type, {source, target})) return ncclInvalidArgument;
  if (type == ncclUint64 && (reduction == ncclSum || reduction == ncclMin))
    return start_of_words(source, target, elements, reduction, comm, stream);
  if (type == ncclUint64 || reduction != ncclSum) return ncclInvalidArgument;
  count_fake_nccl(&fake_nccl_counts::reductions);
  return start(
      comm, stream,
      [world = comm->world, rank = comm->rank, operation = comm->operations++, target, elements,
       type,
       part = FakeNcclPart{source, call, {offset_of(comm, source), offset_of(comm, target)}}] {
        std::vector<float> sums(elements);
        if (!world->meet(operation, rank, part,
                         [&](const auto& parts) { add_backwards(parts, type, 0, sums); }))
          return;
        for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
      });
}

}  // extern "C"
