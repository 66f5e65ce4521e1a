// A training pass of DeviceGpt with the parameters of TensorMemory, over any device. All data is
// copied to device memory and back, as with an engine. Thread rule: one thread at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include <sluice/device.h>
#include "tests/tools/gpt/model_state.h"
#include "tools/gpt/model/device_gpt.h"

namespace sluice::gpt {

// Parameters and gradients of one unit on the device.
struct DeviceUnit {
  DeviceBuffer memory;
  std::vector<std::byte*> tensors;

  std::vector<const std::byte*> const_tensors() const { return {tensors.begin(), tensors.end()}; }
};

inline DeviceUnit device_unit(Device& device, const UnitSpec& unit, DType type) {
  DeviceUnit made;
  std::uint64_t bytes = 0;
  for (const TensorSpec& tensor : unit.tensors)
    bytes += align_up(tensor.element_count() * size_of(type), 256);
  made.memory = DeviceBuffer(device, bytes, "a unit");
  std::byte* next = made.memory.data();
  for (const TensorSpec& tensor : unit.tensors) {
    made.tensors.push_back(next);
    next += align_up(tensor.element_count() * size_of(type), 256);
  }
  return made;
}

// The object copies between the host and the device through page-locked memory. The object waits
// for each copy.
class Transfers {
 public:
  Transfers(Device& device, StreamId stream) : device_(device), stream_(stream) {}

  void to_device(std::byte* target, const void* source, std::uint64_t size_bytes) {
    const AlignedBuffer staging(size_bytes, "a test");
    device_.register_host_memory(staging.span());
    std::memcpy(staging.data(), source, size_bytes);
    device_.copy(target, staging.data(), size_bytes, stream_);
    device_.synchronize(stream_);
    device_.unregister_host_memory(staging.span());
  }
  std::vector<std::byte> to_host(const std::byte* source, std::uint64_t size_bytes) {
    const AlignedBuffer staging(size_bytes, "a test");
    device_.register_host_memory(staging.span());
    device_.copy(staging.data(), source, size_bytes, stream_);
    device_.synchronize(stream_);
    device_.unregister_host_memory(staging.span());
    return {staging.data(), staging.data() + size_bytes};
  }

 private:
  Device& device_;
  StreamId stream_;
};

// Copies `parameters` to the device, unit by unit. Their type is `type`. NaN lies behind each
// tensor.
inline std::vector<DeviceUnit> units_on_device(Device& device, StreamId stream,
                                               const ModelSpec& spec,
                                               const TensorMemory& parameters, DType type) {
  Transfers transfers(device, stream);
  std::vector<DeviceUnit> units;
  for (std::uint32_t unit = 0; unit < spec.units.size(); ++unit) {
    units.push_back(device_unit(device, spec.units[unit], type));
    const std::vector<std::byte> nan(units[unit].memory.size_bytes(), std::byte{0xff});
    transfers.to_device(units[unit].memory.data(), nan.data(), nan.size());
    for (std::size_t i = 0; i < spec.units[unit].tensors.size(); ++i)
      transfers.to_device(units[unit].tensors[i], parameters.pointers(unit)[i],
                          spec.units[unit].tensors[i].element_count() * size_of(type));
  }
  return units;
}

// Whether the bytes between the end of `tensor` and the begin of the next tensor are still NaN.
inline void expect_untouched_behind(const DeviceUnit& unit, const UnitSpec& spec,
                                    std::size_t tensor, DType type, Transfers& transfers) {
  const std::uint64_t size_bytes = spec.tensors[tensor].element_count() * size_of(type);
  const std::uint64_t rest_bytes = align_up(size_bytes, 256) - size_bytes;
  if (rest_bytes == 0) return;
  for (const std::byte byte : transfers.to_host(unit.tensors[tensor] + size_bytes, rest_bytes))
    ASSERT_EQ(byte, std::byte{0xff}) << "written behind " << spec.tensors[tensor].name;
}

// Does the same as run_training_pass(). Gradient memory starts as NaN. So a test notices an element
// that the backward pass forgets, and an element that is written behind a tensor. `parameters` have
// the type ops.type().
inline PassResult run_device_pass(DeviceGpt& gpt, Device& device, const DeviceOps& ops,
                                  const ModelSpec& spec, const TensorMemory& parameters,
                                  const std::vector<std::uint32_t>& tokens,
                                  const std::vector<std::uint32_t>& targets) {
  const Stream stream(device, "test");
  Transfers transfers(device, stream.id());
  const std::vector<DeviceUnit> units =
      units_on_device(device, stream.id(), spec, parameters, ops.type());
  PassResult result{0, {}};
  gpt.start_training(tokens, targets, stream.id());
  for (std::uint32_t use = 0; use < gpt.use_count(); ++use)
    gpt.forward(use, units[index_of(spec.forward_order[use])].const_tensors(), stream.id());
  gpt.keep_loss(stream.id());
  for (std::uint32_t use = 0; use < gpt.use_count(); ++use) {
    const std::uint32_t index = index_of(spec.backward_order[use]);
    const UnitSpec& unit = spec.units[index];
    const DeviceUnit gradients = device_unit(device, unit, ops.gradient_type());
    const std::vector<std::byte> nan(gradients.memory.size_bytes(), std::byte{0xff});
    transfers.to_device(gradients.memory.data(), nan.data(), nan.size());
    gpt.backward(use, units[index].const_tensors(), gradients.tensors, stream.id());
    for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
      const std::uint64_t count = unit.tensors[i].element_count();
      const std::vector<std::byte> bytes =
          transfers.to_host(gradients.tensors[i], count * size_of(ops.gradient_type()));
      expect_untouched_behind(gradients, unit, i, ops.gradient_type(), transfers);
      std::vector<float>& sum = result.gradients[unit.tensors[i].name];
      sum.resize(count, -0.0f);
      for (std::size_t j = 0; j < count; ++j) {
        if (ops.gradient_type() == DType::kFp32) {
          sum[j] += reinterpret_cast<const float*>(bytes.data())[j];
        } else {
          sum[j] += float_from_bf16(reinterpret_cast<const std::uint16_t*>(bytes.data())[j]);
        }
      }
    }
  }
  result.loss = gpt.take_losses(stream.id()).at(0);
  return result;
}

}  // namespace sluice::gpt
