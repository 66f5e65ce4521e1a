// Runs a training pass of DeviceGpt on any device, with the parameters of a TensorMemory. As with
// an engine, all data is copied to device memory and back. Thread rule: one thread at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include <sluice/device.h>
#include "tests/tools/gpt/model/model_state.h"
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

// The function copies `parameters` to the device, unit by unit. The type of the parameters is
// `type`. The padding behind each tensor is filled with NaN.
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

// Expects that the bytes between the end of `tensor` and the beginning of the next tensor are still
// NaN.
inline void expect_untouched_behind(const DeviceUnit& unit, const UnitSpec& spec,
                                    std::size_t tensor, DType type, Transfers& transfers) {
  const std::uint64_t size_bytes = spec.tensors[tensor].element_count() * size_of(type);
  const std::uint64_t rest_bytes = align_up(size_bytes, 256) - size_bytes;
  if (rest_bytes == 0) return;
  for (const std::byte byte : transfers.to_host(unit.tensors[tensor] + size_bytes, rest_bytes))
    ASSERT_EQ(byte, std::byte{0xff}) << "written behind " << spec.tensors[tensor].name;
}

struct TrainingBatch {
  std::vector<std::uint32_t> tokens;
  std::vector<std::uint32_t> targets;
};

// This class holds the values and gradients that cross the boundaries between units, for several
// micro-batches.
class DeviceBoundaryMemory {
 public:
  DeviceBoundaryMemory(Device& device, std::uint64_t value_bytes, std::uint32_t use_count,
                       std::uint32_t micro_batches)
      : value_bytes_(align_up(value_bytes, 256)),
        use_count_(use_count),
        memory_(device, 2 * value_bytes_ * use_count * micro_batches, "values between units") {}

  // Returns the boundaries of one use. `forward_use` is the use's place in forward order.
  DeviceBoundaries of(std::uint32_t forward_use, std::uint32_t micro_batch) const {
    const bool is_first = forward_use == 0;
    const bool is_last = forward_use + 1 == use_count_;
    const auto at = [&](bool exists, std::uint32_t boundary, std::uint64_t kind) {
      const std::uint64_t index = (micro_batch * use_count_ + boundary) * 2 + kind;
      return exists ? memory_.data() + index * value_bytes_ : nullptr;
    };
    return {.micro_batch = micro_batch,
            .input = at(!is_first, forward_use - 1, 0),
            .output = at(!is_last, forward_use, 0),
            .output_gradient = at(!is_last, forward_use, 1),
            .input_gradient = at(!is_first, forward_use - 1, 1)};
  }

 private:
  const std::uint64_t value_bytes_;
  const std::uint32_t use_count_;
  DeviceBuffer memory_;
};

inline void add_gradients(PassResult& result, const DeviceUnit& gradients, const UnitSpec& unit,
                          DType type, Transfers& transfers) {
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const std::uint64_t count = unit.tensors[i].element_count();
    const std::vector<std::byte> bytes =
        transfers.to_host(gradients.tensors[i], count * size_of(type));
    expect_untouched_behind(gradients, unit, i, type, transfers);
    std::vector<float>& sum = result.gradients[unit.tensors[i].name];
    sum.resize(count, -0.0f);
    for (std::size_t j = 0; j < count; ++j) {
      if (type == DType::kFp32) {
        sum[j] += reinterpret_cast<const float*>(bytes.data())[j];
      } else {
        sum[j] += float_from_bf16(reinterpret_cast<const std::uint16_t*>(bytes.data())[j]);
      }
    }
  }
}

// The function runs a training pass for each batch, as run_training_pass() does for one batch. Each
// unit processes all batches before the next unit begins. Gradient memory starts as NaN. A test
// therefore notices if the backward pass forgets an element, or writes behind the end of a tensor.
// `parameters` have the type ops.type().
inline std::vector<PassResult> run_device_passes(DeviceGpt& gpt, Device& device,
                                                 const DeviceOps& ops, const ModelSpec& spec,
                                                 const TensorMemory& parameters,
                                                 const std::vector<TrainingBatch>& batches) {
  const Stream stream(device, "test");
  Transfers transfers(device, stream.id());
  const std::vector<DeviceUnit> units =
      units_on_device(device, stream.id(), spec, parameters, ops.type());
  const std::uint64_t width = spec.units[0].tensors[0].shape[1];
  const std::uint32_t count = gpt.use_count();
  const auto micro_batches = static_cast<std::uint32_t>(batches.size());
  const DeviceBoundaryMemory boundaries(
      device, batches[0].tokens.size() * width * size_of(ops.type()), count, micro_batches);
  std::vector<PassResult> results(micro_batches);
  for (std::uint32_t i = 0; i < micro_batches; ++i)
    gpt.start_training(batches[i].tokens, batches[i].targets, stream.id(), i);
  for (std::uint32_t use = 0; use < count; ++use) {
    const DeviceUnit& unit = units[index_of(spec.forward_order[use])];
    for (std::uint32_t i = 0; i < micro_batches; ++i) {
      gpt.forward(use, unit.const_tensors(), stream.id(), boundaries.of(use, i));
      if (use + 1 == count) gpt.keep_loss(stream.id());
    }
  }
  for (std::uint32_t use = 0; use < count; ++use) {
    const std::uint32_t index = index_of(spec.backward_order[use]);
    for (std::uint32_t i = 0; i < micro_batches; ++i) {
      const DeviceUnit gradients = device_unit(device, spec.units[index], ops.gradient_type());
      const std::vector<std::byte> nan(gradients.memory.size_bytes(), std::byte{0xff});
      transfers.to_device(gradients.memory.data(), nan.data(), nan.size());
      gpt.backward(use, units[index].const_tensors(), gradients.tensors, stream.id(),
                   boundaries.of(count - 1 - use, i));
      add_gradients(results[i], gradients, spec.units[index], ops.gradient_type(), transfers);
    }
  }
  const std::vector<double> losses = gpt.take_losses(stream.id());
  for (std::uint32_t i = 0; i < micro_batches; ++i) results[i].loss = losses.at(i);
  return results;
}

inline PassResult run_device_pass(DeviceGpt& gpt, Device& device, const DeviceOps& ops,
                                  const ModelSpec& spec, const TensorMemory& parameters,
                                  const std::vector<std::uint32_t>& tokens,
                                  const std::vector<std::uint32_t>& targets) {
  return run_device_passes(gpt, device, ops, spec, parameters, {{tokens, targets}}).at(0);
}

}  // namespace sluice::gpt
