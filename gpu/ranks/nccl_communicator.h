// One NCCL communicator. NCCL's calls do not block. NcclCommunicator sets a deadline when it waits
// for NCCL's background work. So NcclCommunicator notices a missing rank.
//
// Thread rule: one thread at a time enqueues on a communicator. Any thread may call failure(),
// abort() and notes(), even while other calls run.
// Invariants: after abort() every call throws, and NCCL's work on the device ends. abort() waits
// for work that is in front of the communicator's on a stream, and may wait forever if that work
// is another communicator's (NcclWatch::fail). A call that fails does not abort the communicator.
// An abort would end earlier work. Until the failure is known, the data of this unfinished work
// would look like a result. So the caller first makes the failure known, and then calls abort(). If
// the caller does not call abort(), the destructor calls abort().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <sluice/cuda_device.h>
#include <sluice/dtype.h>
#include "gpu/ranks/nccl_library.h"

namespace sluice {

// The struct describes one message of an exchange. The message goes to `peer` or comes from `peer`.
struct NcclMessage {
  std::byte* data = nullptr;  // a send only reads the data
  std::uint64_t size_bytes = 0;
  std::uint32_t peer = 0;
  bool is_send = false;
};
// The messages that are exchanged together. Messages without bytes are left out.
struct NcclMessages {
  std::vector<NcclMessage> list;

  void send(std::uint32_t peer, const std::byte* data, std::uint64_t size_bytes) {
    if (size_bytes != 0)
      list.push_back({const_cast<std::byte*>(data), size_bytes, peer, /*is_send=*/true});
  }
  void receive(std::uint32_t peer, std::byte* data, std::uint64_t size_bytes) {
    if (size_bytes != 0) list.push_back({data, size_bytes, peer, /*is_send=*/false});
  }
};

class NcclCommunicator {
 public:
  struct Options {
    double timeout_s = 120;  // the longest time that a call waits for other ranks
    // If this option is true, copy engines move the data of all-gathers. Copy engines need
    // registered memory and a version of NCCL that can use copy engines.
    bool prefers_copy_engines = true;
  };

  // Every rank makes a communicator. All ranks give the same id. `library` and `device` must
  // outlive the communicator.
  // Fails with kRanks if NCCL reports an error, or if other ranks do not come within the timeout.
  NcclCommunicator(const NcclLibrary& library, const Options& options, CudaDevice& device,
                   const NcclId& id, std::uint32_t rank, std::uint32_t rank_count);
  // If the communicator has not failed, the destructor waits for the other ranks, and all ranks end
  // the communicator together.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Every rank calls split(). Ranks of the same color form a communicator. In this communicator,
  // the ranks are in the order of their keys.
  std::unique_ptr<NcclCommunicator> split(std::uint32_t color, std::uint32_t key);

  // When the call returns, the operation is enqueued on `stream`, a cudaStream_t.
  // Fails with kRanks if NCCL reports an error, or if a wait exceeds the timeout.
  void all_gather(std::byte* target, const std::byte* source, std::uint64_t shard_bytes,
                  void* stream);
  void broadcast(std::byte* data, std::uint64_t size_bytes, std::uint32_t root, void* stream);
  void exchange(std::span<const NcclMessage> messages, void* stream);
  // The next two functions add values in NCCL's own order.
  void reduce_scatter(std::byte* target, const std::byte* source, DType type,
                      std::uint64_t shard_elements, void* stream);
  void all_reduce(std::byte* data, DType type, std::uint64_t element_count, void* stream);
  // The call reduces words of 64 bits. Each of the first `sum_count` words becomes the word's sum
  // over the ranks. Each of the next `minimum_count` words becomes the word's minimum over the
  // ranks. One launch computes both the sums and the minima. The order of the ranks does not change
  // the result.
  void all_reduce_words(std::byte* data, std::uint64_t sum_count, std::uint64_t minimum_count,
                        void* stream);

  // Every rank calls register_memory() in the same way. Copy engines gather data into registered
  // memory. The call does nothing if NCCL's version or this machine has no windows.
  void register_memory(std::span<std::byte> memory);
  void deregister_memory() noexcept;
  // Returns notes about abilities that NCCL or the machine lacks, and about what is done instead.
  // The first note is known from the start. Other notes are known after register_memory().
  std::vector<std::string> notes();

  // Returns the failure of NCCL's background work. The result is empty if nothing has failed, and
  // also after abort().
  std::string failure();
  void abort() noexcept;

 private:
  NcclCommunicator(const NcclLibrary& library, const Options& options, CudaDevice& device);

  template <class Body>
  void call(const char* name, const Body& body);
  void* open_communicator(const char* name);
  void settle(int result, const char* name);
  int finish_call();
  // Returns the address of given_. A call of NCCL makes an object, and stores a pointer to the
  // object at this address. Only one such call may be under way.
  template <class Pointer>
  Pointer* given_as();
  [[noreturn]] void give_up(const std::string& message);
  std::string describe(int result);

  // Constant after construction.
  const NcclLibrary& library_;
  const NcclLibrary::Functions& nccl_;  // the functions of library_
  const Options options_;
  CudaDevice& device_;

  std::atomic<bool> has_failed_ = false;  // whether a call has failed

  // The communicator or window that a call makes. A thread of NCCL writes this member. If the call
  // has timed out, NCCL's thread may still write this member until the communicator is aborted.
  void* given_ = nullptr;

  // Held during a call of NCCL that enqueues. Such a call may block until abort(), so abort() waits
  // for this mutex only for a while.
  std::mutex calling_mutex_;

  std::mutex mutex_;
  // Guarded by mutex_.
  void* communicator_ = nullptr;  // an ncclComm_t; null after abort()
  std::vector<void*> windows_;    // ncclWindow_t
  bool lacks_windows_ = false;    // NCCL has windows, but not on this machine
};

}  // namespace sluice
