// The pass of DeviceGpt that training begins with.
#include <algorithm>
#include <vector>

#include "tools/gpt/model/device_gpt.h"

namespace sluice::gpt {
namespace {

// The begins of a unit's tensors, which lie one after the other, each at a multiple of 256 bytes as
// in every placement; last, the end.
std::vector<std::uint64_t> offsets_of(const UnitSpec& unit, std::uint64_t element_bytes) {
  std::vector<std::uint64_t> offsets{0};
  for (const TensorSpec& tensor : unit.tensors)
    offsets.push_back(offsets.back() + align_up(tensor.element_count() * element_bytes, 256));
  return offsets;
}

std::uint64_t largest_bytes(const ModelSpec& spec, std::uint64_t element_bytes) {
  std::uint64_t bytes = 0;
  for (const UnitSpec& unit : spec.units)
    bytes = std::max(bytes, offsets_of(unit, element_bytes).back());
  return bytes;
}

template <class Byte>
std::vector<Byte*> tensors_of(const UnitSpec& unit, std::uint64_t element_bytes, Byte* base) {
  std::vector<Byte*> tensors;
  for (const std::uint64_t offset : offsets_of(unit, element_bytes))
    tensors.push_back(base + offset);
  tensors.pop_back();
  return tensors;
}

}  // namespace

void DeviceGpt::warm_up() {
  const std::uint64_t gradient_bytes = size_of(ops_.gradient_type());
  const DeviceBuffer zeros(device_, largest_bytes(spec_, type_bytes()), "zeros to warm up with");
  const DeviceBuffer sums(device_, largest_bytes(spec_, gradient_bytes), "sums of the warm-up");
  const std::byte* const parameters = zeros.data();
  DeviceBuffer values;
  DeviceBoundaries boundaries;
  if (has_checkpoints()) {
    const std::uint64_t value_bytes = align_up(rows() * config_.embedding * type_bytes(), 256);
    values = DeviceBuffer(device_, 4 * value_bytes, "values between units of the warm-up");
    boundaries = {.input = values.data(),
                  .output = values.data() + value_bytes,
                  .output_gradient = values.data() + 2 * value_bytes,
                  .input_gradient = values.data() + 3 * value_bytes};
  }
  const std::vector<std::uint32_t> tokens(rows());
  const Stream stream(device_, "warm-up");
  start_training(tokens, tokens, stream.id());
  for (std::uint32_t use = 0; use < use_count(); ++use) {
    const UnitSpec& unit = spec_.units[index_of(spec_.forward_order[use])];
    forward(use, tensors_of(unit, type_bytes(), parameters), stream.id(), boundaries);
  }
  for (std::uint32_t use = 0; use < use_count(); ++use) {
    const UnitSpec& unit = spec_.units[index_of(spec_.forward_order[use_count() - 1 - use])];
    backward(use, tensors_of(unit, type_bytes(), parameters),
             tensors_of(unit, gradient_bytes, sums.data()), stream.id(), boundaries);
  }
  device_.synchronize(stream.id());
}

}  // namespace sluice::gpt
