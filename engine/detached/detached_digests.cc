#include "engine/detached/detached_digests.h"

#include <algorithm>
#include <cstring>

#include <sluice/error.h>
#include "gpu/cuda/device_math_choice.h"

namespace sluice {
namespace {

// Null for a device that has no arithmetic of Sluice's: its parameters come to the host each time.
std::unique_ptr<DeviceMath> math_of(Device& device) {
  try {
    return make_device_math(device);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument && error.code() != ErrorCode::kUnsupported)
      throw;
    return nullptr;
  }
}

}  // namespace

DetachedDigests::DetachedDigests(const DetachedPlan& plan, Device& device)
    : plan_(plan), device_(device), is_written_(plan.blocks.size(), false) {
  std::uint64_t next = 0;
  std::uint64_t most = 0;
  for (const DetachedBlock& block : plan.blocks) {
    first_.push_back(next);
    next += block.digest_count;
    most = std::max(most, block.digest_count);
  }
  if (most == 0) return;
  math_ = math_of(device);
  if (math_ == nullptr) return;
  memory_ = AlignedBuffer(plan.digest_bytes, "digests of the parameters");
  written_on_device_ = DeviceBuffer(device, most * sizeof(std::uint64_t), "digests");
  present_on_device_ = DeviceBuffer(device, most * sizeof(std::uint64_t), "digests");
  // CUDA loads the kernel's code at its first launch and waits for the GPU meanwhile. Later, the
  // GPU may be waiting for another rank.
  const Stream stream(device, "optimizer digests", StreamPriority::kHigh);
  math_->digest(written_on_device_.data(), sizeof(std::uint64_t),
                reinterpret_cast<std::uint64_t*>(present_on_device_.data()), stream.id());
  device.synchronize(stream.id());
  device.register_host_memory(memory_.span());
}

DetachedDigests::~DetachedDigests() {
  if (!memory_.span().empty()) device_.unregister_host_memory(memory_.span());
}

bool DetachedDigests::suits(std::uint32_t block, const std::byte* parameter) const {
  return math_ != nullptr && plan_.blocks[block].digest_count != 0 &&
         reinterpret_cast<std::uintptr_t>(parameter) % 16 == 0;
}

void DetachedDigests::take_written(std::uint32_t block, std::span<const std::byte> parameter,
                                   StreamId stream) {
  take(parameter, written_on_device_.data(), written(block), stream);
  is_written_[block] = true;
}

void DetachedDigests::take_present(std::uint32_t block, std::span<const std::byte> parameter,
                                   std::byte* place, StreamId stream) {
  SLUICE_CHECK(has_written(block), "there is something to compare with");
  take(parameter, present_on_device_.data(), {place, written(block).size()}, stream);
}

bool DetachedDigests::is_unchanged(std::uint32_t block, const std::byte* place) const {
  const std::span<const std::byte> kept = written(block);
  return has_written(block) && std::memcmp(kept.data(), place, kept.size()) == 0;
}

std::span<std::byte> DetachedDigests::written(std::uint32_t block) const {
  return {memory_.data() + first_[block] * sizeof(std::uint64_t),
          plan_.blocks[block].digest_count * sizeof(std::uint64_t)};
}

void DetachedDigests::take(std::span<const std::byte> values, std::byte* on_device,
                           std::span<std::byte> target, StreamId stream) {
  math_->digest(values.data(), values.size(), reinterpret_cast<std::uint64_t*>(on_device), stream);
  device_.copy(target.data(), on_device, target.size(), stream);
}

}  // namespace sluice
