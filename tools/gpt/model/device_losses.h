// The class copies the losses of micro-batches from the device to the host. Each loss has a place
// of its own in page-locked memory, so that the compute stream needs no host function after the
// copy.
//
// Thread rule: one thread at a time. Each copy is enqueued on the caller's stream.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/device.h>
#include "base/aligned_buffer.h"

namespace sluice::gpt {

class DeviceLosses {
 public:
  // The number of places for losses. When all places are in use, keep() waits for the copies.
  static constexpr std::uint32_t kPlaces = 512;

  // `device` must outlive the object.
  // Fails with kOutOfMemory if there is not enough memory.
  explicit DeviceLosses(Device& device);
  DeviceLosses(const DeviceLosses&) = delete;
  DeviceLosses& operator=(const DeviceLosses&) = delete;
  ~DeviceLosses();

  // Enqueues a copy of `loss`, which lies on the device. Later work on `stream` may overwrite the
  // loss. The places are reused, so all calls until the next take() or drop() must name the same
  // stream.
  void keep(const double* loss, StreamId stream);
  // Waits for the work on `stream`. Returns the losses of all keep() calls since the last take() or
  // drop(), in the order of the calls.
  // If earlier work on the device has failed, the call throws the error of this work.
  std::vector<double> take(StreamId stream);
  // Forgets the losses. A copy that is under way continues.
  void drop();

 private:
  void collect();

  Device& device_;
  AlignedBuffer places_;  // page-locked
  Event copied_;          // follows all copies so far
  std::uint32_t count_ = 0;
  std::vector<double> collected_;
};

}  // namespace sluice::gpt
