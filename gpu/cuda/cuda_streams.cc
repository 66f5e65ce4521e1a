#include "gpu/cuda/cuda_streams.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"
#include "gpu/device/device_misuse.h"

namespace sluice {

CudaStreams::CudaStreams(int ordinal, std::string name, FailureLatch& failure)
    : ordinal_(ordinal), name_(std::move(name)), failure_(failure) {
  const CudaCurrentDevice current(ordinal_);
  int least = 0;
  SLUICE_CUDA(cudaDeviceGetStreamPriorityRange(&least, &high_priority_));
}

StreamId CudaStreams::create(StreamPriority priority) {
  const CudaCurrentDevice current(ordinal_);
  cudaStream_t native = nullptr;
  SLUICE_CUDA(cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking,
                                           priority == StreamPriority::kHigh ? high_priority_ : 0));
  try {
    return add(wrap(native));
  } catch (...) {
    (void)cudaStreamDestroy(native);
    throw;
  }
}

StreamId CudaStreams::adopt(void* native) {
  const CudaCurrentDevice current(ordinal_);
  std::unique_ptr<CudaStream> stream = wrap(native);
  stream->is_adopted = true;
  // A record of an event of this GPU fails on a stream of another one.
  const cudaError_t status = cudaEventRecord(stream->reached, stream->stream);
  const bool is_known = [&] {
    const std::scoped_lock lock(mutex_);
    return std::ranges::any_of(
        streams_, [&](const auto& entry) { return entry.second->stream == stream->stream; });
  }();
  if (status == cudaSuccess && !is_known) return add(std::move(stream));
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
  (void)cudaEventDestroy(stream->reached);
  throw Error(
      ErrorCode::kInvalidArgument,
      is_known ? fmt::format("adopt_stream: {} has the stream {} already; use that Stream, or "
                             "destroy it first",
                             name_, native)
               : fmt::format("adopt_stream: the runtime does not take {} for a stream of {}: {}; "
                             "give a cudaStream_t of this GPU",
                             native, name_, cudaGetErrorString(status)));
}

std::unique_ptr<CudaStream> CudaStreams::wrap(void* native) const {
  auto stream = std::make_unique<CudaStream>();
  stream->stream = static_cast<cudaStream_t>(native);
  stream->calls = std::make_shared<HostCallQueue>(failure_);
  SLUICE_CUDA(
      cudaEventCreateWithFlags(&stream->reached, cudaEventBlockingSync | cudaEventDisableTiming));
  return stream;
}

StreamId CudaStreams::add(std::unique_ptr<CudaStream> stream) {
  const std::scoped_lock lock(mutex_);
  const StreamId id{++last_id_};
  streams_.emplace(id, std::move(stream));
  return id;
}

CudaStream& CudaStreams::at(StreamId id) const {
  const std::scoped_lock lock(mutex_);
  const auto entry = streams_.find(id);
  if (entry == streams_.end()) refuse_stream(name_, id);
  return *entry->second;
}

bool CudaStreams::are_none() const {
  const std::scoped_lock lock(mutex_);
  return streams_.empty();
}

std::unique_ptr<CudaStream> CudaStreams::take(StreamId id) {
  const std::scoped_lock lock(mutex_);
  const auto entry = streams_.find(id);
  SLUICE_CHECK(entry != streams_.end(), "the stream exists");
  std::unique_ptr<CudaStream> stream = std::move(entry->second);
  streams_.erase(entry);
  return stream;
}

int CudaStreams::give_back(const CudaStream& stream) const noexcept {
  int chosen = 0;
  const CudaCurrentDevice current(ordinal_, std::nothrow, &chosen);
  const cudaError_t event = cudaEventDestroy(stream.reached);
  const cudaError_t own = stream.is_adopted ? cudaSuccess : cudaStreamDestroy(stream.stream);
  return event != cudaSuccess ? event : own != cudaSuccess ? own : chosen;
}

}  // namespace sluice
