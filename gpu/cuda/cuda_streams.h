// The streams of a CUDA device. The device has made some of these streams, and has adopted the
// other streams. Thread rule: any thread may call every function. Nothing may use a stream while a
// thread destroys that stream.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include <sluice/device.h>
#include "gpu/cuda/cuda_stream.h"
#include "gpu/device/host_stream.h"

namespace sluice {

class CudaStreams {
 public:
  // `name` is the name of the device in messages. `failure` must outlive the streams.
  // Fails with the errors of SLUICE_CUDA.
  CudaStreams(int ordinal, std::string name, FailureLatch& failure);

  // Fails with the errors of SLUICE_CUDA.
  StreamId create(StreamPriority priority);
  // `native` is a cudaStream_t of the application. The application still owns `native`.
  // Fails with the errors of CudaDevice::adopt_stream().
  StreamId adopt(void* native);
  // Fails with kInvalidArgument if there is no such stream.
  CudaStream& at(StreamId id) const;
  bool are_none() const;

  // Removes the stream from this object, so that later calls do not find the stream.
  // Requires: there is such a stream.
  std::unique_ptr<CudaStream> take(StreamId id);
  // The function releases the runtime's objects of a stream that take() has removed. Returns the
  // first failure as a cudaError_t.
  // Requires: the stream's work has ended.
  int give_back(const CudaStream& stream) const noexcept;

 private:
  std::unique_ptr<CudaStream> wrap(void* native) const;
  StreamId add(std::unique_ptr<CudaStream> stream);

  const int ordinal_;
  const std::string name_;
  FailureLatch& failure_;
  int high_priority_ = 0;  // CUDA's smallest priority number; constant after construction

  mutable std::mutex mutex_;
  // mutex_ guards these members, but not the objects that the pointers refer to.
  std::uint32_t last_id_ = 0;
  std::unordered_map<StreamId, std::unique_ptr<CudaStream>> streams_;
};

}  // namespace sluice
