#include "engine/detached/detached_digests.h"

#include <algorithm>

#include <sluice/error.h>
#include <sluice/units.h>
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

std::uint64_t parameter_bytes(const DetachedBlock& block) {
  return block.element_count * size_of(block.format.state.parameter);
}

}  // namespace

DetachedDigests::DetachedDigests(const DetachedPlan& plan, Device& device, std::uint32_t places)
    : plan_(plan),
      device_(device),
      math_(math_of(device)),
      first_{0},
      is_written_(plan.blocks.size(), false) {
  if (math_ == nullptr) return;
  for (const DetachedBlock& block : plan.blocks) {
    const bool is_wide = block.format.state.master == MasterLayout::kFp32;
    const std::uint64_t count = is_wide ? 0 : div_ceil(parameter_bytes(block), kDigestBytes);
    first_.push_back(first_.back() + count);
    most_ = std::max(most_, count);
  }
  if (most_ == 0) return;
  const std::uint64_t size_bytes = (first_.back() + places * most_) * sizeof(std::uint64_t);
  memory_ = AlignedBuffer(size_bytes, "digests of the parameters");
  written_on_device_ = DeviceBuffer(device, most_ * sizeof(std::uint64_t), "digests");
  present_on_device_ = DeviceBuffer(device, most_ * sizeof(std::uint64_t), "digests");
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
  return math_ != nullptr && first_[block + 1] != first_[block] &&
         reinterpret_cast<std::uintptr_t>(parameter) % 16 == 0;
}

void DetachedDigests::take_written(std::uint32_t block, std::span<const std::byte> parameter,
                                   StreamId stream) {
  take(parameter, written_on_device_.data(), written(block), stream);
  is_written_[block] = true;
}

void DetachedDigests::take_present(std::uint32_t place, std::uint32_t block,
                                   std::span<const std::byte> parameter, StreamId stream) {
  SLUICE_CHECK(has_written(block), "there is something to compare with");
  take(parameter, present_on_device_.data(), present(place, block), stream);
}

bool DetachedDigests::is_unchanged(std::uint32_t place, std::uint32_t block) const {
  return has_written(block) && std::ranges::equal(written(block), present(place, block));
}

std::span<std::uint64_t> DetachedDigests::written(std::uint32_t block) const {
  auto* const all = reinterpret_cast<std::uint64_t*>(memory_.data());
  return {all + first_[block], first_[block + 1] - first_[block]};
}

std::span<std::uint64_t> DetachedDigests::present(std::uint32_t place, std::uint32_t block) const {
  auto* const all = reinterpret_cast<std::uint64_t*>(memory_.data());
  return {all + first_.back() + place * most_, first_[block + 1] - first_[block]};
}

void DetachedDigests::take(std::span<const std::byte> values, std::byte* on_device,
                           std::span<std::uint64_t> target, StreamId stream) {
  math_->digest(values.data(), values.size(), reinterpret_cast<std::uint64_t*>(on_device), stream);
  device_.copy(reinterpret_cast<std::byte*>(target.data()), on_device, target.size_bytes(), stream);
}

}  // namespace sluice
