// The class copies parameters and gradients of a detached optimizer from a device to the host,
// block by block. The class also copies the updated parameters back to the device. The values of
// each block get a place in page-locked host memory. If a parameter still has the values of the
// last update, only the gradient is copied.
//
// Thread rule: functions run on the scheduler's thread, unless their comments say otherwise.
// Invariant: after take(), a place belongs to one block. The place becomes free when the argument
// `done` of send() is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <sluice/device.h>
#include "base/aligned_buffer.h"
#include "base/trace/trace_recorder.h"
#include "engine/detached/detached_digests.h"
#include "engine/detached/detached_plan.h"
#include "engine/run/scheduler.h"

namespace sluice {

// The memory of one block on the device.
struct DeviceValues {
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  std::uint64_t parameter_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t update = 0;  // the number of the block's update, for traces
};

class DetachedStaging {
 public:
  using Place = std::uint32_t;

  // All arguments must outlive the object.
  // Fails with the errors of DetachedDigests, Device::register_host_memory() and
  // Device::create_stream().
  DetachedStaging(const DetachedPlan& plan, Device& device, Scheduler& scheduler);
  // Requires: is_idle().
  ~DetachedStaging();
  DetachedStaging(const DetachedStaging&) = delete;
  DetachedStaging& operator=(const DetachedStaging&) = delete;

  // Later copies from the device wait for the work that is on `stream` at this call. Any thread may
  // call this function.
  void wait_for(StreamId stream);

  bool has_place() const { return !free_.empty(); }
  bool is_idle() const { return copies_ == 0; }

  // Requires: has_place().
  Place take();
  // Copies the gradient of `block` to `place`, and the parameter unless the record has the same
  // values. After the copy, `done` runs, unless the device has failed.
  void bring(Place place, std::uint32_t block, const DeviceValues& values,
             std::function<void()> done);
  // Copies the parameter in `place` to the device. After the copy, the place is free again and
  // `done` runs, unless the device has failed.
  void send(Place place, std::uint32_t block, const DeviceValues& values,
            std::function<void()> done);

  // The record of `block` has been changed other than by an update.
  void forget(std::uint32_t block) { digests_.forget(block); }

  // Returns whether bring() has copied the parameter. Otherwise the record has its values.
  bool has_parameter(Place place) const { return has_parameter_[place]; }

  // These functions return the parameter of the block in `place`, and the gradient of this block.
  // Any thread may call them, and has_parameter(), while the place belongs to a block that has
  // come.
  std::byte* parameter(Place place) const { return memory_.data() + place * plan_.staging_bytes; }
  const std::byte* gradient(Place place, std::uint32_t block) const {
    return parameter(place) + staged_gradient_offset(plan_.blocks[block]);
  }

 private:
  std::byte* digests(Place place, std::uint32_t block) const {
    return parameter(place) + staged_digest_offset(plan_.blocks[block]);
  }
  void bring_parameter(Place place, std::uint32_t block, const DeviceValues& values,
                       std::function<void()> done);
  TraceRecord begun(std::uint32_t block, const DeviceValues& values, TraceKind kind,
                    std::uint64_t size_bytes) const;
  void follow(const Stream& stream, const Event& copied, TraceRecord record,
              std::function<void()> done);

  const DetachedPlan& plan_;
  Device& device_;
  Scheduler& scheduler_;
  AlignedBuffer memory_;
  std::vector<Event> copied_;                // by place
  std::vector<std::uint8_t> has_parameter_;  // by place; not bool: threads read while others change
  Event given_;                              // the application's work before an update
  std::vector<Place> free_;
  std::uint32_t copies_ = 0;  // copies under way, and calls that follow copies
  Stream down_;
  Stream up_;
  DetachedDigests digests_;
};

}  // namespace sluice
