// A device and its operations, for tests. The tests run on the host device, and also on a GPU if
// the machine has one. Thread rule: one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <sluice/units.h>
#include "gpu/math/host_launcher.h"
#include "tools/gpt/model/cuda_ops.h"
#include "tools/gpt/model/device_ops_over.h"

namespace sluice::gpt {

struct DeviceMachine {
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceOps> ops;
};

struct DeviceMachineFactory {
  std::string name;
  std::function<std::string()> why_not;  // empty when make() works
  std::function<DeviceMachine(DType type, DType gradient_type)> make;
};

// Returns the factory of a machine that runs the kernel bodies on the host.
inline DeviceMachineFactory host_machine() {
  return {"host", [] { return std::string(); },
          [](DType type, DType gradient_type) {
            auto device = make_host_device({.memory_bytes = 256_MiB, .has_own_memory = true});
            auto ops = std::make_unique<DeviceOpsOver<HostLauncher>>(HostLauncher(*device), type,
                                                                     gradient_type);
            return DeviceMachine{std::move(device), std::move(ops)};
          }};
}

// Returns the factory of a machine with a GPU. `products` selects the kernels for matrix products.
// The kernels are either the library's kernels or plain kernels.
inline DeviceMachineFactory cuda_machine(ProductKernels products) {
  return {products == ProductKernels::kFast ? "cuda" : "cuda_plain",
          [] { return why_no_cuda_code(); },
          [products](DType type, DType gradient_type) {
            auto device = make_cuda_device({.memory_bytes = 1_GiB});
            auto ops = make_cuda_ops(*device, type, gradient_type, products);
            return DeviceMachine{std::move(device), std::move(ops)};
          }};
}

}  // namespace sluice::gpt
