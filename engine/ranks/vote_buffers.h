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
  // The call first waits for copies that put() has started.
  ~VoteBuffers();
  VoteBuffers(const VoteBuffers&) = delete;
  VoteBuffers& operator=(const VoteBuffers&) = delete;

  std::byte* on_device() const { return on_device_.data(); }
  std::uint64_t size_bytes() const { return on_device_.size_bytes(); }

  // Starts to copy `values` to the device, `offset_bytes` behind the start of the buffer. `values`
  // is no longer needed after the call. If no get() has followed an earlier put(), because the work
  // between them has failed, the call first waits for the earlier copy.
  // Requires: the values fit.
  void put(std::span<const std::byte> values, std::uint64_t offset_bytes, StreamId stream);
  // Copies the first bytes of the device's buffer to `values`, behind all earlier work of the
  // stream. Returns when the copy has ended.
  // Fails like Device::synchronize().
  void get(std::span<std::byte> values, StreamId stream);

 private:
  void await_copy();

  Device& device_;
  DeviceBuffer on_device_;
  AlignedBuffer on_host_;  // registered
  Event copied_;           // the last copy of put() has ended
  bool is_copying_ = false;
};

}  // namespace sluice
