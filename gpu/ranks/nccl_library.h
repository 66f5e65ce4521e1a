// The NCCL library, opened at run time. Thread rule: any thread.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include <sluice/cuda_device.h>

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
  // Tells what the version cannot do, and what is done instead. Empty: it can do everything.
  std::string limit() const;
  // Fails with kRanks.
  NcclId make_id() const;
  // Device memory from which windows can be made.
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
