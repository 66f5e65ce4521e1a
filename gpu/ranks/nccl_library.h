// The NCCL library, which is opened at run time. Thread rule: any thread.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include <sluice/cuda_device.h>

namespace sluice {

// The id that the ranks of one run share. Rank 0 makes the id and sends it to the other ranks.
using NcclId = std::array<std::byte, 128>;

// The function sets the environment variables that NCCL and the CUDA runtime read at their first
// call. With these variables, NCCL makes the connections together with the communicator, and not at
// the first operation. And NCCL does not meet other ranks when an operation is enqueued. The
// function also calls prepare_cuda_environment(). The function does not change variables that are
// already set.
// Requires: no other thread runs yet.
void prepare_nccl_environment();

// The functions of the NCCL library. The library is never closed.
class NcclLibrary {
 public:
  // If `path` is empty, the loader searches for libnccl.so.2. Fails with kUnsupported if the
  // library cannot be opened or lacks functions. The message names the library and the missing
  // functions.
  static const NcclLibrary& open(const std::string& path = "");
  ~NcclLibrary();

  int version() const { return version_; }  // 22809 for 2.28.9
  std::string version_text() const;
  // Returns whether buffers can be registered as windows (since NCCL 2.28). The copy engines of a
  // GPU can gather data into windows.
  bool has_windows() const;
  // Returns a text that names the abilities that the version lacks. The text also says what is done
  // instead. The text is empty if the version lacks nothing.
  std::string limit() const;
  // Fails with kRanks if NCCL makes no id.
  NcclId make_id() const;
  // Returns a source of device memory. Windows can be made from this memory.
  // Requires: has_windows().
  CudaMemorySource memory_source() const;

  struct Functions;  // gpu/ranks/nccl_functions.inc
  const Functions& functions() const { return *functions_; }

 private:
  explicit NcclLibrary(const std::string& path);

  std::unique_ptr<Functions> functions_;
  int version_ = 0;
};

}  // namespace sluice
