#include "engine/ranks/vote_buffers.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <sluice/error.h>

namespace sluice {

VoteBuffers::VoteBuffers(Device& device, std::uint64_t size_bytes, std::string_view purpose)
    : device_(device),
      on_device_(device, size_bytes, purpose),
      on_host_(size_bytes, purpose),
      copied_(device) {
  device.register_host_memory(on_host_.span());
}

VoteBuffers::~VoteBuffers() {
  try {
    await_copy();
  } catch (const std::exception&) {
    // Copies behind a failure are over, too.
  }
  device_.unregister_host_memory(on_host_.span());
}

void VoteBuffers::put(std::span<const std::byte> values, std::uint64_t offset_bytes,
                      StreamId stream) {
  SLUICE_CHECK(offset_bytes + values.size() <= size_bytes(), "ranks say little at a time");
  await_copy();
  std::ranges::copy(values, on_host_.data());
  device_.copy(on_device_.data() + offset_bytes, on_host_.data(), values.size(), stream);
  device_.record(copied_.id(), stream);
  is_copying_ = true;
}

void VoteBuffers::await_copy() {
  if (std::exchange(is_copying_, false)) device_.synchronize(copied_.id());
}

void VoteBuffers::get(std::span<std::byte> values, StreamId stream) {
  SLUICE_CHECK(values.size() <= size_bytes(), "ranks say little at a time");
  device_.copy(on_host_.data(), on_device_.data(), values.size(), stream);
  device_.synchronize(stream);
  is_copying_ = false;
  std::ranges::copy(on_host_.span().first(values.size()), values.begin());
}

}  // namespace sluice
