// The buffers through which ranks exchange values that lie in host memory: one in device memory,
// for the collectives, and one in registered host memory, for the copies to and from it. A copy
// between a GPU and other host memory would block the calling thread until all earlier work of the
// stream has ended, and so until the slowest rank has come.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <sluice/device.h>
#include "base/aligned_buffer.h"

namespace sluice {

class VoteBuffers {
 public:
  // `device` must outlive the object. `purpose` names the buffers in error messages.
  // Fails with kOutOfMemory if there is not enough memory.
  VoteBuffers(Device& device, std::uint64_t size_bytes, std::string_view purpose);
  // Requires: all copies have ended.
  ~VoteBuffers();
  VoteBuffers(const VoteBuffers&) = delete;
  VoteBuffers& operator=(const VoteBuffers&) = delete;

  std::byte* on_device() const { return on_device_.data(); }
  std::uint64_t size_bytes() const { return on_device_.size_bytes(); }

  // Starts to copy `values` to the device, `offset_bytes` behind the start of the buffer. `values`
  // is no longer needed after the call.
  // Requires: the copies of all earlier calls have ended, and the values fit.
  void put(std::span<const std::byte> values, std::uint64_t offset_bytes, StreamId stream);
  // Copies the first bytes of the device's buffer to `values`, behind all earlier work of the
  // stream. Returns when the copy has ended.
  // Fails like Device::synchronize().
  void get(std::span<std::byte> values, StreamId stream);

 private:
  Device& device_;
  DeviceBuffer on_device_;
  AlignedBuffer on_host_;  // registered
};

}  // namespace sluice
