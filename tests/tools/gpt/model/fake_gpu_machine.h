// A machine with a GPU whose runtime and whose cuBLASLt are stand-ins, for tests on the host. Only
// programs that link to both stand-ins include this header. Thread rule: one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tests/gpu/cuda/fake_cuda_launcher.h"
#include "tests/tools/gpt/model/device_machine.h"
#include "tools/gpt/model/cublaslt.h"
#include "tools/gpt/model/cuda_ops_over.h"

namespace sluice::gpt {

inline DeviceMachineFactory fake_gpu_machine() {
  return {"fake", [] { return CublasLt::why_not(); },
          [](DType type, DType gradient_type) {
            auto device = make_cuda_device({.memory_bytes = 256_MiB});
            auto ops = std::make_unique<CudaOpsOver<test::FakeCudaLauncher>>(
                *device, type, gradient_type, ProductKernels::kFast);
            return DeviceMachine{std::move(device), std::move(ops)};
          }};
}

}  // namespace sluice::gpt
