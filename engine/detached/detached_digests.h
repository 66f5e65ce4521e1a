// The class says whether a block's 16-bit parameter on a device still has the values of the last
// update. Then the record in host memory has the same values, and the parameter need not be copied
// to the host. A kernel makes digests of the values after each update, and again before the next
// update. The digests are copied to the host, and have a thousandth of the parameter's bytes.
//
// Thread rule: the scheduler's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/device.h>
#include "base/aligned_buffer.h"
#include "engine/detached/detached_plan.h"
#include "gpu/math/device_math.h"

namespace sluice {

class DetachedDigests {
 public:
  // `plan` and `device` must outlive the object.
  // Fails with the errors of Device::allocate(), Device::register_host_memory() and the device's
  // first kernel.
  DetachedDigests(const DetachedPlan& plan, Device& device);
  // Requires: no copy of the object is under way.
  ~DetachedDigests();
  DetachedDigests(const DetachedDigests&) = delete;
  DetachedDigests& operator=(const DetachedDigests&) = delete;

  // Returns whether the block's parameter can have digests. The parameter must be a 16-bit type and
  // lie at a multiple of 16 bytes, and the device must be able to run the kernel.
  bool suits(std::uint32_t block, const std::byte* parameter) const;

  // Enqueues on `stream` the digests of the values that an update has written.
  // Requires: suits(). All calls have the same stream.
  void take_written(std::uint32_t block, std::span<const std::byte> parameter, StreamId stream);
  // Enqueues on `stream` the digests of the values that the parameter has now. The digests are
  // copied to `place`, which is registered memory for DetachedBlock::digest_count numbers.
  // Requires: has_written(). All calls have the same stream.
  void take_present(std::uint32_t block, std::span<const std::byte> parameter, std::byte* place,
                    StreamId stream);

  // Returns whether the last call for the block was take_written().
  bool has_written(std::uint32_t block) const { return is_written_[block]; }
  // The values in the block's record are no longer the values of the last update.
  void forget(std::uint32_t block) { is_written_[block] = false; }

  // Requires: the work of take_written(), and of take_present() with `place`, has ended.
  bool is_unchanged(std::uint32_t block, const std::byte* place) const;

 private:
  std::span<std::byte> written(std::uint32_t block) const;
  void take(std::span<const std::byte> values, std::byte* on_device, std::span<std::byte> target,
            StreamId stream);

  const DetachedPlan& plan_;
  Device& device_;
  std::unique_ptr<DeviceMath> math_;  // null where the device cannot run the kernel
  std::vector<std::uint64_t> first_;  // by block: where its digests are
  std::vector<bool> is_written_;
  AlignedBuffer memory_;
  DeviceBuffer written_on_device_;
  DeviceBuffer present_on_device_;
};

}  // namespace sluice
