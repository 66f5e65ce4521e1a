// A stand-in for NCCL over the stand-in for the CUDA runtime, in a library of its own that is
// opened at run time like the real one. Ranks are threads of one process. It keeps NCCL's hardest
// promises and no more: calls answer "in progress", and what they asked for comes on the stream
// only when the caller polls; messages between two ranks meet in their order; an abort ends waiting
// work; NCCL's own reductions add in an order of their own (backwards). FAKE_NCCL_VERSION sets the
// version.
#include "tests/gpu/fake_nccl.h"

#include <nccl.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/dtype.h"

extern "C" void sluice_fake_cuda_launch(cudaStream_t stream, void (*work)(void*), void* data);

namespace {

struct Sent {
  const void* data;
  bool is_taken = false;
};

// A clique of ranks. One mutex for all of the fake would do; one a clique is as simple.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  int size = 0;
  int joined = 0;
  std::set<int> aborted;  // ranks: their own waiting ends, the others hear of it when they ask
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Sent>>> sent;  // by (from, to)
  std::map<std::uint64_t, std::vector<const void*>> parts;                // by operation
  std::map<std::uint64_t, int> done;
  struct Split {
    std::vector<std::pair<int, int>> choices;  // color and key, by rank
    int chosen = 0;
    std::map<int, std::shared_ptr<World>> worlds;  // by color
  };
  std::map<std::uint64_t, Split> splits;
};

fake_nccl_counts counts;
std::mutex counts_mutex;
void count(int fake_nccl_counts::*member, int by = 1) {
  const std::scoped_lock lock(counts_mutex);
  counts.*member += by;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<World> world;
  int rank = 0;
  bool has_joined = false;  // world->joined counts it
  // A split that is under way: the parent's, and which.
  std::shared_ptr<World> parent;
  std::uint64_t split = 0;
  int parent_rank = 0;
  std::uint64_t operations = 0;
  std::uint64_t splits = 0;
  // Comes to its stream at the poll after next.
  std::vector<std::function<void()>> pending;
  int polls = 0;
};

struct ncclWindow_vidmem {};

namespace {

thread_local bool is_in_group = false;
struct GroupedMessage {
  void* data;
  std::size_t size_bytes;
  int peer;
  bool is_send;
  ncclComm_t comm;
  cudaStream_t stream;
};
thread_local std::vector<GroupedMessage> group;

void launch(cudaStream_t stream, std::function<void()> work) {
  sluice_fake_cuda_launch(
      stream,
      [](void* data) {
        const std::unique_ptr<std::function<void()>> owned(
            static_cast<std::function<void()>*>(data));
        (*owned)();
      },
      new std::function<void()>(std::move(work)));
}

ncclResult_t start(ncclComm_t comm, cudaStream_t stream, std::function<void()> work) {
  comm->pending.push_back([stream, work = std::move(work)] { launch(stream, work); });
  comm->polls = 0;
  return ncclInProgress;
}

// All ranks bring a part; `work` reads them; nobody leaves before all are through.
void meet(World& world, std::uint64_t operation, int rank, const void* part,
          const std::function<void(const std::vector<const void*>&)>& work) {
  std::unique_lock lock(world.mutex);
  auto& parts = world.parts[operation];
  parts.resize(static_cast<std::size_t>(world.size));
  parts[static_cast<std::size_t>(rank)] = part;
  int& done = world.done[operation];
  const auto wait_for = [&](int until) {
    ++done;
    world.changed.notify_all();
    world.changed.wait(lock, [&] { return done >= until || world.aborted.count(rank) != 0; });
  };
  wait_for(world.size);
  if (world.aborted.count(rank) != 0) return;
  lock.unlock();
  work(parts);
  lock.lock();
  wait_for(2 * world.size);
}

float load(ncclDataType_t type, const void* data, std::size_t i) {
  if (type == ncclFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return type == ncclBfloat16 ? sluice::float_from_bf16(bits) : sluice::float_from_fp16(bits);
}
void save(ncclDataType_t type, void* data, std::size_t i, float value) {
  if (type == ncclFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        type == ncclBfloat16 ? sluice::bf16_from_float(value) : sluice::fp16_from_float(value);
  }
}
std::size_t size_of(ncclDataType_t type) {
  return type == ncclFloat32 ? 4 : type == ncclInt8 ? 1 : 2;
}

void transfer(World& world, int rank, const std::vector<GroupedMessage>& messages) {
  std::vector<std::shared_ptr<Sent>> own;
  std::unique_lock lock(world.mutex);
  for (const GroupedMessage& message : messages) {
    if (!message.is_send) continue;
    own.push_back(std::make_shared<Sent>(Sent{message.data}));
    world.sent[{rank, message.peer}].push_back(own.back());
  }
  world.changed.notify_all();
  for (const GroupedMessage& message : messages) {
    if (message.is_send) continue;
    auto& queue = world.sent[{message.peer, rank}];
    world.changed.wait(lock, [&] { return !queue.empty() || world.aborted.count(rank) != 0; });
    if (world.aborted.count(rank) != 0) return;
    std::memcpy(message.data, queue.front()->data, message.size_bytes);
    queue.front()->is_taken = true;
    queue.pop_front();
    world.changed.notify_all();
  }
  world.changed.wait(lock, [&] {
    for (const auto& sent : own)
      if (!sent->is_taken && world.aborted.count(rank) == 0) return false;
    return true;
  });
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

std::map<std::uint64_t, std::shared_ptr<World>>& worlds() {
  static std::map<std::uint64_t, std::shared_ptr<World>> all;
  return all;
}
std::mutex worlds_mutex;

}  // namespace

extern "C" {

fake_nccl_counts fake_nccl_take_counts() {
  const std::scoped_lock lock(counts_mutex);
  return std::exchange(counts, {});
}

ncclResult_t ncclGetVersion(int* version) {
  const char* const text = std::getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? NCCL_VERSION_CODE : std::atoi(text);
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
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
const char* ncclGetLastError(ncclComm_t) {
  return "the last words of the fake";
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->blocking != 0 || config->magic != 0xcafebeef) return ncclInvalidArgument;
  std::uint64_t number = 0;
  std::memcpy(&number, &id, sizeof number);
  const std::scoped_lock lock(worlds_mutex);
  auto& world = worlds()[number];
  if (world == nullptr) world = std::make_shared<World>();
  *comm = new ncclComm{.world = world, .rank = rank};
  const std::scoped_lock own(world->mutex);
  world->size = size;
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  *part = new ncclComm{.parent = whole->world, .split = whole->splits, .parent_rank = whole->rank};
  const std::scoped_lock lock(whole->world->mutex);
  World::Split& split = whole->world->splits[whole->splits++];
  split.choices.resize(static_cast<std::size_t>(whole->world->size));
  split.choices[static_cast<std::size_t>(whole->rank)] = {color, key};
  ++split.chosen;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = ncclInProgress;
  if (comm->world == nullptr && !finish_split(*comm)) return ncclSuccess;
  {
    const std::scoped_lock lock(comm->world->mutex);
    if (!comm->has_joined) ++comm->world->joined;
    comm->has_joined = true;
    if (!comm->world->aborted.empty()) *result = ncclRemoteError;
    if (!comm->world->aborted.empty() || comm->world->joined < comm->world->size)
      return ncclSuccess;
  }
  if (!comm->pending.empty() && ++comm->polls < 2) return ncclSuccess;
  for (const auto& enqueue : std::exchange(comm->pending, {})) enqueue();
  *result = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->world != nullptr) {
    const std::scoped_lock lock(comm->world->mutex);
    comm->world->aborted.insert(comm->rank);
    comm->world->changed.notify_all();
  }
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  is_in_group = true;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  is_in_group = false;
  if (group.empty()) return ncclSuccess;
  const auto messages = std::exchange(group, {});
  const ncclComm_t comm = messages.front().comm;
  return start(comm, messages.front().stream, [world = comm->world, rank = comm->rank, messages] {
    transfer(*world, rank, messages);
  });
}
ncclResult_t ncclSend(const void* data, std::size_t size, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  group.push_back({const_cast<void*>(data), size, peer, true, comm, stream});
  return ncclInProgress;
}
ncclResult_t ncclRecv(void* data, std::size_t size, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (!is_in_group || type != ncclInt8) return ncclInvalidUsage;
  group.push_back({data, size, peer, false, comm, stream});
  return ncclInProgress;
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = size * size_of(type);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, source,
                target, bytes] {
                 meet(*world, operation, rank, source, [&](const auto& parts) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     std::memmove(static_cast<char*>(target) + i * bytes, parts[i], bytes);
                 });
               });
}
ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t size, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = size * size_of(type);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, source,
                target, bytes, root] {
                 meet(*world, operation, rank, source, [&](const auto& parts) {
                   if (rank != root)
                     std::memcpy(target, parts[static_cast<std::size_t>(root)], bytes);
                 });
               });
}
ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t elements,
                               ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
  count(&fake_nccl_counts::reductions);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, source,
                target, elements, type] {
                 const std::size_t first = static_cast<std::size_t>(rank) * elements;
                 std::vector<float> sums(elements);
                 meet(*world, operation, rank, source, [&](const auto& parts) {
                   for (std::size_t i = 0; i < elements; ++i)
                     for (std::size_t part = parts.size(); part-- > 0;)
                       sums[i] += load(type, parts[part], first + i);
                 });
                 for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
               });
}
ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t elements,
                           ncclDataType_t type, ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  count(&fake_nccl_counts::reductions);
  return start(comm, stream,
               [world = comm->world, rank = comm->rank, operation = comm->operations++, source,
                target, elements, type] {
                 std::vector<float> sums(elements);
                 meet(*world, operation, rank, source, [&](const auto& parts) {
                   for (std::size_t i = 0; i < elements; ++i)
                     for (std::size_t part = parts.size(); part-- > 0;)
                       sums[i] += load(type, parts[part], i);
                 });
                 for (std::size_t i = 0; i < elements; ++i) save(type, target, i, sums[i]);
               });
}

ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, std::size_t, void** handle) {
  count(&fake_nccl_counts::buffers);
  *handle = memory;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  count(&fake_nccl_counts::buffers, -1);
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void** memory, std::size_t size) {
  count(&fake_nccl_counts::allocations);
  return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* memory) {
  count(&fake_nccl_counts::allocations, -1);
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, std::size_t, ncclWindow_t* window,
                                    int flags) {
  if (flags != NCCL_WIN_COLL_SYMMETRIC) return ncclInvalidArgument;
  count(&fake_nccl_counts::windows);
  *window = new ncclWindow_vidmem;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) {
  count(&fake_nccl_counts::windows, -1);
  delete window;
  return ncclSuccess;
}

}  // extern "C"
