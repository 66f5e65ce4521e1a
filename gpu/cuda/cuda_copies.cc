#include "gpu/cuda/cuda_copies.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>

#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"

namespace sluice {
namespace {

// One direction's stream. The two directions enqueue pieces in turns, so that neither waits for the
// other's enqueueing.
class Direction {
 public:
  Direction(const CopyEnds& ends, cudaMemcpyKind kind) : ends_(ends), kind_(kind) {
    SLUICE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Direction(const Direction&) = delete;
  Direction& operator=(const Direction&) = delete;
  ~Direction() { (void)cudaStreamDestroy(stream_); }

  void copy(std::uint64_t offset_bytes, std::uint64_t size_bytes) {
    if (ends_.host == nullptr) return;
    void* const host = ends_.host + offset_bytes;
    void* const device = ends_.device + offset_bytes;
    const bool is_up = kind_ == cudaMemcpyHostToDevice;
    SLUICE_CUDA(
        cudaMemcpyAsync(is_up ? device : host, is_up ? host : device, size_bytes, kind_, stream_));
  }
  void wait() { SLUICE_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  const CopyEnds ends_;
  const cudaMemcpyKind kind_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

double plain_copies_s(CudaDevice& device, const CopyEnds& up, const CopyEnds& down,
                      std::uint64_t size_bytes, std::uint64_t piece_bytes, unsigned rounds) {
  const CudaCurrentDevice current(device.ordinal());
  Direction to_device(up, cudaMemcpyHostToDevice);
  Direction to_host(down, cudaMemcpyDeviceToHost);
  const auto begin = std::chrono::steady_clock::now();
  for (unsigned round = 0; round < rounds; ++round) {
    for (std::uint64_t offset = 0; offset < size_bytes; offset += piece_bytes) {
      const std::uint64_t piece = std::min(piece_bytes, size_bytes - offset);
      to_device.copy(offset, piece);
      to_host.copy(offset, piece);
    }
  }
  to_device.wait();
  to_host.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace sluice
