// The NCCL library, opened at run time, and one NCCL communicator. NCCL's calls do not block.
// NcclCommunicator waits for NCCL's background work with a deadline, so that a missing rank is
// noticed.
//
// Thread rule: one thread at a time enqueues on a communicator. Any thread may call failure() and
// abort(), also at the same time as other calls. Any thread may use NcclLibrary.
// Invariants: after abort() every call throws, and NCCL's work on the device ends. A call that
// fails does not abort the communicator: earlier work would end, and look like a result, before the
// failure is known. The caller makes the failure known, then calls abort(). If the caller does not
// call abort(), the destructor does.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/cuda_device.h>
#include <sluice/dtype.h>

namespace sluice {

// The id that the ranks of one run share. Rank 0 makes the id and sends it to the other ranks.
using NcclId = std::array<std::byte, 128>;

// The functions of the NCCL library, which is never closed.
class NcclLibrary {
 public:
  // If `path` is empty, the library is libnccl.so.2, as the loader finds it.
  // Fails with kUnsupported, naming the library and the functions that the library lacks.
  static const NcclLibrary& open(const std::string& path = "");
  ~NcclLibrary();

  int version() const { return version_; }  // 22809 for 2.28.9
  std::string version_text() const;
  // has_registration() says that buffers can be registered (NCCL 2.19). The call has_windows() says
  // that buffers can be registered in windows, into which copy engines gather (NCCL 2.28).
  bool has_registration() const;
  bool has_windows() const;
  // Fails with kRanks.
  NcclId make_id() const;
  // Device memory from which windows can be made.
  // Requires: has_windows().
  CudaMemorySource memory_source() const;

  struct Functions;  // nccl_communicator.cc
  const Functions& functions() const { return *functions_; }

 private:
  explicit NcclLibrary(const std::string& path);

  std::unique_ptr<Functions> functions_;
  int version_ = 0;
};

// One message of an exchange, to or from `peer`.
struct NcclMessage {
  std::byte* data = nullptr;  // a send only reads the data
  std::uint64_t size_bytes = 0;
  std::uint32_t peer = 0;
  bool is_send = false;
};

class NcclCommunicator {
 public:
  struct Options {
    double timeout_s = 120;  // the limit of a call's wait for other ranks
    // If this is true, copy engines do all-gathers. Copy engines need registered memory and a
    // version of NCCL that can use copy engines.
    bool prefers_copy_engines = true;
  };

  // Every rank makes a communicator, with the same id. `library` and `device` must outlive the
  // communicator.
  // Fails with kRanks.
  NcclCommunicator(const NcclLibrary& library, const Options& options, CudaDevice& device,
                   const NcclId& id, std::uint32_t rank, std::uint32_t rank_count);
  // The destructor ends the communicator together with the other ranks, unless the communicator has
  // failed.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Every rank calls split(). Ranks of the same color form a communicator, in the order of their
  // keys.
  std::unique_ptr<NcclCommunicator> split(std::uint32_t color, std::uint32_t key);

  // Each operation is enqueued on `stream`, a cudaStream_t, when the call returns.
  // Fails with kRanks.
  void all_gather(std::byte* target, const std::byte* source, std::uint64_t shard_bytes,
                  void* stream);
  void broadcast(std::byte* data, std::uint64_t size_bytes, std::uint32_t root, void* stream);
  void exchange(std::span<const NcclMessage> messages, void* stream);
  // The next two functions add in NCCL's own order.
  void reduce_scatter(std::byte* target, const std::byte* source, DType type,
                      std::uint64_t shard_elements, void* stream);
  void all_reduce(std::byte* data, DType type, std::uint64_t element_count, void* stream);
  // The call reduces words of 64 bits: the first `sum_count` words are added, and the next
  // `minimum_count` words become their minimum. One launch computes both the sums and the minima.
  // The order of the ranks does not change the result.
  void all_reduce_words(std::byte* data, std::uint64_t sum_count, std::uint64_t minimum_count,
                        void* stream);

  // Every rank calls register_memory() in the same way. Operations on this memory then need no
  // copies inside NCCL. Does nothing if NCCL's version has no registration.
  void register_memory(std::span<std::byte> memory);
  void deregister_memory() noexcept;

  // The failure of NCCL's background work. The result is empty if nothing has failed, and after
  // abort().
  std::string failure();
  void abort() noexcept;

 private:
  NcclCommunicator(const NcclLibrary& library, const Options& options, CudaDevice& device);

  template <class Body>
  void call(const char* name, const Body& body);
  void settle(int result, const char* name);
  [[noreturn]] void give_up(const std::string& message);
  std::string describe(int result);

  // Constant after construction.
  const NcclLibrary& library_;
  const NcclLibrary::Functions& nccl_;  // the library's
  const Options options_;
  CudaDevice& device_;

  std::atomic<bool> has_failed_ = false;  // a call

  std::mutex mutex_;
  // Guarded by mutex_.
  void* communicator_ = nullptr;      // an ncclComm_t; null after abort()
  std::vector<void*> registrations_;  // handles or windows
};

}  // namespace sluice
