// A baseline for the device's copies. A plain loop of cudaMemcpyAsync copies the same bytes, with
// one stream per direction. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/cuda_device.h>

namespace sluice {

// The host memory (page-locked) and the device memory of one direction, `size_bytes` each; null =
// no copies.
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
