// A baseline for the device's copies: the same bytes by a plain loop of cudaMemcpyAsync, one stream
// per direction. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/cuda_device.h>

namespace sluice {

// Page-locked host memory and device memory of `size_bytes` each, for one direction; null = none.
struct CopyEnds {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

// Copies `up` to the device and `down` to the host at the same time, each in pieces of
// `piece_bytes`, `rounds` times. Returns the elapsed seconds.
// Fails with: as SLUICE_CUDA.
double plain_copies_s(CudaDevice& device, const CopyEnds& up, const CopyEnds& down,
                      std::uint64_t size_bytes, std::uint64_t piece_bytes, unsigned rounds);

}  // namespace sluice
